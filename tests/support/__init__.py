"""Helpers of the tests. `*_worker` has functions for processes of their own, see `processes`."""
