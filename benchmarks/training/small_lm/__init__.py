"""A small language model to measure with.

corpora      text that comes with every Python
model        the network
pretraining  on one device
training     its data-parallel training step
gradients    gradients of its workers
"""
