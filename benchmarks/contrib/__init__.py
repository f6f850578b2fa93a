"""Benchmarks of the systems in `dynamiq_jax.contrib`."""
