"""Bucket size with the shortest training step, measured on a step of a user.

__main__  `python -m benchmarks.speed.tune_buckets MODULE:FUNCTION`
command   its options and its table
steps     steps made by a function of a user, and the plot
tuner     search of a size, and the time of a step
"""
