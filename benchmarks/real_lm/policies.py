"""Methods by kind of tensor that take as many bytes as 5 bits for all.

The embedding has 21 % of the parameters, the attention 20 %, and the MLPs 59 %. A benchmark takes
the name of a policy in place of that of a method.
"""

import dynamiq_jax as dq

POLICIES = {
    "embedding 3, rest 5.5": {"embed": "dynamiq:3", ".*": "dynamiq:5.53"},
    "embedding 4, rest 5.3": {"embed": "dynamiq:4", ".*": "dynamiq:5.27"},
    "embedding 6, rest 4.7": {"embed": "dynamiq:6", ".*": "dynamiq:4.73"},
    "attention 6, rest 4.8": {"attn": "dynamiq:6", ".*": "dynamiq:4.75"},
    "mlp 5.5, rest 4.3": {"mlp": "dynamiq:5.5", ".*": "dynamiq:4.28"},
}
# The default of 0.2.0, in which rows of small norm carry little but noise.
FROM_TWO = {
    f"{bits} bits, codes from 2": {".*": dq.DynamiQ(bits=bits, widths=tuple(range(2, 17)))}
    for bits in (4, 5)
}
