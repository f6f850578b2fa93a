"""Faults of the kernels, which reproduce the wire format."""

from pallas_kernels import compat
from tests.faults import Fault

NO_MOSAIC = "" if compat.has_mosaic_gpu() else "this JAX has no Mosaic GPU kernels"

FAULTS = (
    Fault(
        "the last block is not moved back to end with its class",
        "pallas_kernels/_mosaic_gpu/blocks.py",
        "first = lax.min((program - before) * rows, jnp.int32(c.rows - rows))",
        "first = (program - before) * rows",
        ("tests/test_mosaic_gpu.py",),
        equivalent=NO_MOSAIC,
    ),
    Fault(
        "lanes 128 and up round like those before them",
        "pallas_kernels/_mosaic_gpu/blocks.py",
        "return words, words >> np.uint32(16)",
        "return words, words",
        ("tests/test_mosaic_gpu.py",),
        equivalent=NO_MOSAIC,
    ),
    Fault(
        "local rows are left out of a sum",
        "pallas_kernels/_mosaic_gpu/blocks.py",
        "pieces = [a + b for a, b in zip(pieces, decode(block, part), strict=True)]",
        "pieces = list(decode(block, part))",
        ("tests/test_mosaic_gpu.py",),
        equivalent=NO_MOSAIC,
    ),
    Fault(
        "the padding of a message is not written",
        "pallas_kernels/_mosaic_gpu/blocks.py",
        "for byte in range(layout.padding_start, layout.payload_bytes):",
        "for byte in range(layout.payload_bytes, layout.payload_bytes):",
        ("tests/test_mosaic_gpu.py",),
        equivalent=NO_MOSAIC,
    ),
    Fault(
        "rows of another width are handled again",
        "pallas_kernels/_triton/blocks.py",
        "return lax.max(first, wider), lax.min(last, enough - 1)",
        "return first, lax.min(last, enough - 1)",
        ("tests/test_kernels.py",),
    ),
    Fault(
        "rows are decoded to the places of the first chunk",
        "pallas_kernels/_triton/blocks.py",
        "kernel(block, order_ref[chunk, place], *refs)",
        "kernel(block, order_ref[0, place], *refs)",
        ("tests/test_kernels.py",),
    ),
    Fault(
        "factors of norms may be subnormal",
        "pallas_kernels/_triton/kernels.py",
        "unit = jnp.minimum(largest, LARGEST_UNIT)",
        "unit = largest",
        ("tests/test_kernels.py::test_factors_of_norms_are_not_subnormal",),
    ),
    Fault(
        "the padding of a message is not written",
        "pallas_kernels/_triton/message.py",
        "if layout.padding_start < layout.payload_bytes:",
        "if layout.padding_start > layout.payload_bytes:",
        ("tests/test_kernels.py::test_blocks_of_any_size_write_every_byte",),
    ),
    Fault(
        "bits that a width lacks are read",
        "pallas_kernels/_triton/message.py",
        "mask=has_bit, other=0",
        "other=0",
        ("tests/test_kernels.py",),
    ),
    Fault(
        "group scales of 8 lanes are stored in the wrong pieces",
        "pallas_kernels/_triton/message.py",
        "at = (groups + count // 2 * piece)[:, None] + iota(count // 2)[None, :]",
        "at = (groups + piece)[:, None] + iota(count // 2)[None, :]",
        ("tests/test_kernels.py::test_a_hop_writes_the_bytes_of_the_base[groups of 8-triton]",),
    ),
    Fault(
        "lanes 128 and up round like those before them",
        "pallas_kernels/_triton/rows.py",
        "halves_to_offsets(words[piece % 4], piece // 4, ",
        "halves_to_offsets(words[piece % 4], 0, ",
        ("tests/test_kernels.py::test_a_hop_writes_the_bytes_of_the_base",),
    ),
    Fault(
        "narrow gradients are added before they are widened",
        "pallas_kernels/_triton/rows.py",
        "to_float32(rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]])",
        "to_float32(rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]]"
        ".astype(jnp.bfloat16))",
        ("tests/test_kernels.py::test_a_hop_writes_the_bytes_of_the_base",),
    ),
    Fault(
        "small norms are computed without a unit",
        "pallas_kernels/_xla.py",
        "_USUAL = (2.0**-40, 2.0**120)",
        "_USUAL = (-1.0, 2.0**120)",
        ("tests/test_norms.py",),
    ),
    Fault(
        "chunks share the noise of their rows",
        "pallas_kernels/_xla.py",
        "jnp.uint32(layout.rows_per_chunk)",
        "jnp.uint32(0)",
        ("tests/test_codec_oracle.py",),
    ),
    Fault(
        "only the first of several messages is added to rows",
        "pallas_kernels/_triton/rows.py",
        "return decode(block, messages_ref, index * halves, pieces)",
        "return decode(block, messages_ref, 0, pieces)",
        ("tests/test_kernels.py::test_any_number_of_messages_is_added",),
    ),
    Fault(
        "only the first of several messages is added",
        "pallas_kernels/_xla.py",
        "return values + _decode(messages, message, places, first, count, layout)",
        "return values + _decode(messages, 0, places, first, count, layout)",
        ("tests/test_codec_oracle.py",),
    ),
    Fault(
        "arrays beyond 32-bit indices go to kernels",
        "pallas_kernels/implementation.py",
        'small = all(getattr(leaf, "size", 1) < _INDEX_LIMIT for leaf in jax.tree.leaves(args))',
        "small = True",
        ("tests/test_kernels.py::test_arrays_beyond_32_bit_indices_are_left_to_the_base",),
    ),
    Fault(
        "the newest GPU decides what the others run",
        "pallas_kernels/implementation.py",
        "capability = min(",
        "capability = max(",
        ("tests/test_kernels.py::test_all_gpus_have_to_be_new_enough",),
    ),
    Fault(
        "kernels stay allowed after the context",
        "pallas_kernels/implementation.py",
        "_without_gpu.reset(token)",
        "pass",
        ("tests/test_kernels.py::test_a_backend_that_cannot_run_is_refused_with_the_reason",),
    ),
    Fault(
        "the last block of rows reaches beyond the chunk",
        "pallas_kernels/row_blocks.py",
        "return step(lax.min(index * count, num_rows - count), count, carry)",
        "return step(index * count, count, carry)",
        ("tests/test_codec_oracle.py",),
    ),
)
