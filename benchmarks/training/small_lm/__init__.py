"""A small language model to measure with; text and pre-training are those of `examples.llm`.

model      the network
training   its data-parallel training step
gradients  gradients of its workers
"""
