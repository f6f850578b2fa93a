"""Tests of the library, the commands, the examples, the benchmarks and the documentation."""
