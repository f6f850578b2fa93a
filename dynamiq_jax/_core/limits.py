"""Largest bucket: programs count in int32, which JAX has without `jax_enable_x64`."""

# Coordinates of a bucket, and bytes of all of its messages together. Programs compute an index into
# either as int32: coordinates in samples of the error, in shards and in lists of single ones, and
# bytes where the message of a chunk starts. The last eighth of 2^31 is for padding: less than 512
# coordinates for each chunk, which is a 64th with 65,536 of them, and what a method adds to fill up
# its own blocks, a 16th in THC. All other indices count something larger, of which there are fewer:
# rows of 256, units of 32 bytes of one message, chunks, places in the first dimension of a leaf.
MOST_IN_BUCKET = 7 * 2**28
