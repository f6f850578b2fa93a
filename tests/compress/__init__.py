"""Tests of `dq.compress`: the sums of steps that others wrote."""
