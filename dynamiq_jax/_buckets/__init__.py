"""From a tree to buckets and back: the parts that all collectives share.

options      what a user can set
checks       errors for bad input
axes         slow and fast axes
leaves       leaves of a tree, flat vectors
plan         which leaves go together, which stay exact
exact        exact sums
operations   kinds of collectives
driver       one loop for all of them
no_gradient  values that must not be differentiated
"""
