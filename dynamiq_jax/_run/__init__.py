"""The run of a call: a loop over its buckets, on each device."""
