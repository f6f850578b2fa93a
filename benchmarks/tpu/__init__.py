"""Benchmark of the kernels on a TPU, the twin of `benchmarks.gpu`."""
