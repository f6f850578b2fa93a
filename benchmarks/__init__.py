"""Benchmarks, each run from the root of a checkout: `python -m benchmarks.speed.codec`."""
