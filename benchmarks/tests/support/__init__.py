"""Helpers of the tests of benchmarks."""
