"""Functions that users call.

collectives  psum, pmean, psum_scatter, all_gather
optimizer    the all-reduce as an optax transformation
autodiff     value_and_grad
arguments    arguments of its loss
in_specs     how they are split over the workers
batch        shapes of the arrays that are split
static       values that are constants of the program
modules      nnx modules among them
transposed   pcast, whose transpose is a compressed sum
replicas     means in a global view
report       bytes on the wire, without running anything
metrics      error of an estimate
"""
