"""The codec's operations, one folder each, with one file per backend.

    api.py         the public function: picks a backend by `implementation`
    xla.py         pure JAX, always there, always right: the base that other backends reproduce
    triton.py      fused kernels for NVIDIA GPUs from Ampere on
    mosaic_gpu.py  the same for Hopper and newer, for when Triton is gone

    statistics              norm and mean of every super-group
    compress                local rows to a message: the first hop
    hop                     messages decoded, local rows added, the sum encoded again: with one
                            message the step of a ring, with n - 1 that of an all-to-all
    decompress_accumulate   messages decoded, local rows added
    decompress              the messages of all chunks to rows in their original places

Operations work on whole messages: they take the local array as it lies in memory, the table of rows
and the chunk's index, so that a fused kernel gathers, decodes, adds, encodes and packs in one pass.
Beside the folders lies what their backends share: `blocks` for XLA; `operands` for all kernels; for
Triton, from the bottom up, `triton_launch`, `triton_arithmetic`, `triton_blocks`, `triton_message`
and `triton_rows`; for Mosaic GPU `mosaic_gpu_launch` and `mosaic_gpu_blocks`.
"""
