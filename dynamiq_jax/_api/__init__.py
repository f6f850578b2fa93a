"""Functions that users call.

collectives  psum, pmean, psum_scatter, all_gather
optimizer    the all-reduce as an optax transformation
autodiff     value_and_grad
report       bytes on the wire, without running anything
metrics      error of an estimate
"""
