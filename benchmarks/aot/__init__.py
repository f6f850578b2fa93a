"""Sections of `benchmarks.aot.h200` and `benchmarks.aot.pipelined`.

kernels         registers, spills, bytes and instructions of every kernel
pmean           a compressed `pmean` alone, for several GPUs
training_step   a data-parallel training step, for several GPUs
pipelined_step  a pipelined training step (DeAR), for several GPUs
transfers       collectives of a scheduled program, and what runs meanwhile
"""
