"""Programs that JAX has traced, with their sums over an axis replaced by compressed ones.

Passes over the nodes of a program (`nodes.py`) follow each other: `contractions.py` marks the sums
of the compiler, `origins.py` finds gradients, `reading.py` chooses sums, `schedule.py` groups them,
and `evaluate.py` runs the schedule while JAX traces it.
"""
