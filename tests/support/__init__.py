"""Helpers of the tests, and scripts that they run in processes of their own: `*_worker`."""
