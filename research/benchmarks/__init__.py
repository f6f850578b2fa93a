"""Benchmarks of the systems in `dynamiq_research`."""
