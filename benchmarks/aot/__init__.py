"""Sections of `benchmarks.aot_h200`.

kernels        registers, spills, bytes and instructions of every kernel
pmean          a compressed `pmean` alone, for several GPUs
training_step  a data-parallel training step, for several GPUs
"""
