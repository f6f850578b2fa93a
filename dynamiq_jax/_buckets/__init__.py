"""From a tree to buckets and back: the parts that all collectives share."""
