"""Programs that JAX has traced, with their sums over an axis replaced by compressed ones.

`program.py` traces a step and calls passes over its nodes (`nodes.py`), one after the other:
`contractions.py` marks the sums of the compiler, `origins.py` finds gradients, `reading.py` chooses
sums, and `schedule.py` groups them. `evaluate.py` runs the schedule while JAX traces it anew.
"""
