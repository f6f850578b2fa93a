"""The DynamiQ codec in pure JAX: the specification (`docs/wire_format.md`) that every kernel
reproduces.

Bottom-up: `arithmetic`, `packing` (codes to bytes), `levels` (magnitudes to reals), `rounding`
(shared randomness), `scales`, `rows` (a block of rows to codes and back), `layout` (static shape of
a chunk), `allocation` (bits to widths), `ordering` (rows to width classes); and, for other methods,
`blocks` (codes of one width and a few bytes beside each block). Nothing here communicates.
"""
