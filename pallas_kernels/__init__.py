"""The codec's operations, one folder each, with one file per backend.

    api.py   the public function: picks a backend by `implementation`
    xla.py   pure JAX, always there, always right: the base that other backends reproduce

Operations work on whole messages: they take the local array as it lies in memory, the table of rows
  and the chunk's index, so that
a fused kernel can gather, decode, add, encode and pack in one pass.
"""
