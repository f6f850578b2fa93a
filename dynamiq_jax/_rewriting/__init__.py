"""Programs that JAX has traced, with their sums over an axis replaced by compressed ones.

A program is scheduled, and then run: `schedule.py` puts sums into groups, `inner.py` has the
equations that hold programs of their own, and `evaluate.py` runs the schedule while JAX traces it.
"""
