"""The DynamiQ codec in pure JAX: the specification in `docs/wire_format.md`, which every kernel
reproduces.

From the bottom up:

    arithmetic  elementary operations that a backend may implement in its own way
    packing     codes to bytes
    levels      magnitudes to codes and back
    rounding    shared random offsets
    norms       L2 norms over the whole range of float32
    scales      scales of groups and super-groups
    rows        rows to codes and scales, and back
    layout      shape of a bucket on the wire
    ordering    rows to places

Nothing here communicates. Other methods pack, round and scale with the same functions.
"""
