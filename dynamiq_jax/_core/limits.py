"""Largest bucket: programs count in int32, which JAX has without `jax_enable_x64`."""

# Coordinates of a bucket, and bytes of all of its messages together. Programs compute an index into
# either as int32: coordinates in samples of the error, in shards and in lists of single ones, and
# bytes where the message of a chunk starts. Padding has the last eighth of 2^31. It is less than
# 512 coordinates for each chunk, so that of 65,536 workers is a 32nd; and a method may fill up its
# chunks, of which THC takes most: a 16th. All other indices count something larger, of which there
# are fewer: rows of 256, units of 32 bytes of one message, chunks, places in the first dimension.
MOST_IN_BUCKET = 7 * 2**28
