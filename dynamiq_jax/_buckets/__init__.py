"""From a tree to buckets and back: the parts that all collectives share.

options      what a user can set
checks       errors for bad input
axes         slow and fast axes
leaves       leaves of a tree, flat vectors
shards       their parts on the devices of further axes
plan         which leaves go together, which stay exact
exact        exact sums
operations   kinds of collectives
loop         one loop over buckets for all of them
driver       from trees to that loop
fingerprint  keys that follow from parameters
no_gradient  values that must not be differentiated
"""
