"""Faults of the wire format and of the kernels that reproduce it."""

from pallas_kernels import compat
from tests.faults import Fault

CODEC, TRITON, MOSAIC = (
    "pallas_kernels/codec/",
    "pallas_kernels/_triton/",
    "pallas_kernels/_mosaic_gpu/",
)
NO_MOSAIC = "" if compat.has_mosaic_gpu() else "this JAX has no Mosaic GPU kernels"

ALLOCATION = ("tests/test_allocation.py",)
LAWS = ("tests/test_codec_laws.py",)
LAYOUT = ("tests/test_layout.py",)
LEVELS = ("tests/test_levels.py",)
NORMS = ("tests/test_norms.py",)
ORACLE = ("tests/test_codec_oracle.py",)
ORDERING = ("tests/test_ordering.py",)
PACKING = ("tests/test_packing.py",)
ROUNDING = ("tests/test_rounding.py",)
SCALES = ("tests/test_scales.py",)
KERNELS = ("tests/test_kernels.py",)
HOP = ("tests/test_kernels.py::test_a_hop_writes_the_bytes_of_the_base",)
MOSAIC_GPU = ("tests/test_mosaic_gpu.py",)

FAULTS = [
    # arithmetic
    Fault(
        "codes are cut off instead of rounded to the nearest",
        CODEC + "arithmetic.py",
        "whole = jnp.round(value)",
        "whole = jnp.floor(value)",
        LEVELS,
    ),
    # packing
    Fault(
        "planes are written high bits first",
        CODEC + "packing.py",
        "packed.append(_merge_lanes(field, bits).reshape(-1))",
        "packed.insert(0, _merge_lanes(field, bits).reshape(-1))",
        PACKING,
    ),
    Fault(
        "lanes of a byte are neighbors",
        CODEC + "packing.py",
        "    values = values.reshape(-1, lanes, row_bytes(bits)) << shifts[None, :, None]\n"
        "    return lax.reduce(values, np.uint8(0), lax.bitwise_or, (1,))",
        "    values = values.reshape(-1, row_bytes(bits), lanes) << shifts[None, None, :]\n"
        "    return lax.reduce(values, np.uint8(0), lax.bitwise_or, (2,))",
        PACKING,
    ),
    # levels
    Fault(
        "rounding in the log domain: the gap above is taken for that below",
        CODEC + "levels.py",
        "short = ops.multiply_add(levels.gap(code, position, ops), offset, position - t)",
        "short = ops.multiply_add(levels.gap(code + 1, position, ops), offset, position - t)",
        LEVELS,
    ),
    Fault(
        "no margin against an inverse above its level",
        CODEC + "levels.py",
        "shift=linear / growth + 0.5 + (linear / growth + top) * _INVERSE_ERROR,",
        "shift=linear / growth + 0.5 - (linear / growth + top) * _INVERSE_ERROR,",
        LEVELS,
    ),
    Fault(
        "the polynomial of a geometric spacing has a degree too few",
        CODEC + "levels.py",
        "log_range: float, degree: int = 6)",
        "log_range: float, degree: int = 4)",
        LEVELS,
    ),
    Fault(
        "a width without codes counts as one with a level",
        CODEC + "levels.py",
        "return jax.tree.map(np.float32, levels._replace(top=num_levels(width)))",
        "return jax.tree.map(np.float32, levels)",
        (*LAWS, *LAYOUT),
    ),
    # rounding
    Fault(
        "both lanes of a word take its low half",
        CODEC + "rounding.py",
        "return half_to_offset(words >> (lanes // _HALF * np.uint32(16))[None, :])",
        "return half_to_offset(words)",
        ROUNDING,
    ),
    Fault(
        "offsets start at 0 instead of half a step above",
        CODEC + "rounding.py",
        "np.float32(128 - 2**-17)",
        "np.float32(128)",
        ROUNDING,
    ),
    Fault(
        "independent rounding repeats its noise in every turn",
        CODEC + "rounding.py",
        'return mix(words + _uint32(turn) * _GOLDEN) if rounding == "independent" else words',
        'return mix(words) if rounding == "independent" else words',
        ROUNDING,
    ),
    Fault(
        "half of the seed is ignored",
        CODEC + "rounding.py",
        "words = mix(mix(row_ids ^ seed[0]) + seed[1])",
        "words = mix(mix(row_ids ^ seed[0]) + seed[0])",
        ROUNDING,
    ),
    # scales
    Fault(
        "super-scales are rounded to the nearest",
        CODEC + "scales.py",
        "rounded_up = (maxima + np.uint32(0xFFFF)) >> np.uint32(16)",
        "rounded_up = (maxima + np.uint32(0x7FFF)) >> np.uint32(16)",
        SCALES,
    ),
    Fault(
        "maxima as floats, which drop NaN",
        CODEC + "scales.py",
        "    bits = lax.bitcast_convert_type(jnp.abs(rows), jnp.int32)\n    # In two steps",
        "    bits = lax.bitcast_convert_type(jnp.nan_to_num(jnp.abs(rows)), jnp.int32)\n"
        "    # In two steps",
        SCALES,
    ),
    Fault(
        "group scales are rounded down",
        CODEC + "scales.py",
        "return jnp.minimum(ops.ceil(share * np.float32(255)), np.float32(255))",
        "return jnp.minimum(jnp.floor(share * np.float32(255)), np.float32(255))",
        SCALES,
    ),
    Fault(
        "rows that are lost have the largest energy",
        CODEC + "scales.py",
        "return jnp.where(words == NAN_BITS, np.uint32(0), energies).astype(jnp.uint16)",
        "return energies.astype(jnp.uint16)",
        SCALES,
    ),
    Fault(
        "Inf travels as bits of its own",
        CODEC + "scales.py",
        "return jnp.where(jnp.isfinite(rounded), bits, np.uint16(NAN_BITS))",
        "return jnp.where(jnp.isnan(rounded), np.uint16(NAN_BITS), bits)",
        SCALES,
    ),
    # rows
    Fault(
        "the unit of a norm has no limit",
        CODEC + "rows.py",
        "unit = jnp.minimum(jnp.max(jnp.abs(values), axis=axis, keepdims=True), LARGEST_UNIT)",
        "unit = jnp.max(jnp.abs(values), axis=axis, keepdims=True)",
        NORMS,
    ),
    Fault(
        "one unit for all norms",
        CODEC + "rows.py",
        "unit = jnp.minimum(jnp.max(jnp.abs(values), axis=axis, keepdims=True), LARGEST_UNIT)\n"
        "    squares = jnp.sum((values * inverse_unit(unit)) ** 2, axis=axis)",
        "unit = jnp.minimum(jnp.max(jnp.abs(values), axis=axis, keepdims=True), LARGEST_UNIT)\n"
        "    squares = jnp.sum((values * inverse_unit(jnp.max(unit))) ** 2, axis=axis)",
        NORMS,
    ),
    Fault(
        "the sign of a negative zero is lost",
        CODEC + "rows.py",
        "negative = lax.bitcast_convert_type(rows, jnp.int32) < 0",
        "negative = rows < 0",
        LAWS,
    ),
    Fault(
        "width 0 drops NaN with the finite rows",
        CODEC + "rows.py",
        "value = levels.position(code_to_float(words & top))",
        "value = levels.position(code_to_float(words & top))\n"
        "    scale = jnp.where(top == 0, np.float32(0), scale)",
        LAWS,
    ),
    # layout
    Fault(
        "rows of a class are cut off instead of rounded",
        CODEC + "layout.py",
        "round(cumulative * rows_per_chunk)",
        "int(cumulative * rows_per_chunk)",
        LAYOUT,
    ),
    Fault(
        "halves of rows are rounded up",
        CODEC + "layout.py",
        "round(cumulative * rows_per_chunk)",
        "int(cumulative * rows_per_chunk + 0.5)",
        LAYOUT,
    ),
    Fault(
        "the first row of a class has the levels of the class before",
        CODEC + "layout.py",
        "(places[:, None] >= later_classes)",
        "(places[:, None] > later_classes)",
        LAYOUT,
    ),
    Fault(
        "messages are aligned to 8 bytes",
        CODEC + "layout.py",
        "ALIGNMENT = 16",
        "ALIGNMENT = 8",
        LAYOUT,
    ),
    # ordering
    Fault(
        "consecutive chunks all hold the rows of the first",
        CODEC + "ordering.py",
        "return ranked + firsts[:, None]",
        "return ranked + 0 * firsts[:, None]",
        ORDERING,
    ),
    Fault(
        "neighboring ranks go to the same chunk",
        CODEC + "ordering.py",
        "return rank(norm_bits).reshape(layout.rows_per_chunk, layout.num_chunks).T",
        "return rank(norm_bits).reshape(layout.num_chunks, layout.rows_per_chunk)",
        ORDERING,
    ),
    Fault(
        "the index of the last row of a large bucket reaches into its norm",
        CODEC + "ordering.py",
        "if _BITS + index_bits > 32:",
        "if _BITS + index_bits > 33:",
        ORDERING,
    ),
    Fault(
        "rows are put at their places once more",
        CODEC + "ordering.py",
        "return rows.at[inverse].get(",
        "return rows.at[places].get(",
        ORDERING,
    ),
    # base
    Fault(
        "small norms are computed without a unit",
        "pallas_kernels/_xla.py",
        "_USUAL = (2.0**-40, 2.0**120)",
        "_USUAL = (-1.0, 2.0**120)",
        NORMS,
    ),
    Fault(
        "chunks share the noise of their rows",
        "pallas_kernels/_xla.py",
        "jnp.uint32(layout.rows_per_chunk)",
        "jnp.uint32(0)",
        ORACLE,
    ),
    Fault(
        "only the first of several messages is added",
        "pallas_kernels/_xla.py",
        "return values + _decode(messages, message, first, count, layout)",
        "return values + _decode(messages, 0, first, count, layout)",
        ORACLE,
    ),
    Fault(
        "the last block of rows reaches beyond the chunk",
        "pallas_kernels/row_blocks.py",
        "return step(lax.min(index * count, num_rows - count), count, carry)",
        "return step(index * count, count, carry)",
        ORACLE,
    ),
    # bucket
    Fault(
        "sums of consecutive rows stay in the order of the table",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "return restore_rows(self.sums(payloads, chunk), places).reshape(-1)",
        "return self.sums(payloads, chunk).reshape(-1)",
        ORACLE,
    ),
    Fault(
        "a worker's part is read as if it were the whole bucket",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "order=self.local.order - self.first)",
        "order=self.local.order)",
        ORACLE,
    ),
    Fault(
        "rounded values have the noise of the first turn",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "lax.map(lambda chunk: self.compress(chunk, turn), chunks)",
        "lax.map(lambda chunk: self.compress(chunk, 0), chunks)",
        ORACLE,
    ),
    Fault(
        "rounded values are not those that are sent",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "local = self.local._replace(rows=rows)\n        return self.layout",
        "local = self.local\n        return self.layout",
        ORACLE,
    ),
    Fault(
        "sums of eight workers keep the order of the table",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "if num_workers >= _MIN_WORKERS_TO_REORDER",
        "if num_workers > _MIN_WORKERS_TO_REORDER",
        ORACLE,
    ),
    Fault(
        "scales of sums are sent in the new order",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "return layout.with_scales(message, *of_sums)",
        "return message",
        ORACLE,
    ),
    Fault(
        "super-scales of sums are not put in the order of their codes",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "jnp.take_along_axis(super_bits, order, axis=1),",
        "super_bits,",
        ORACLE,
    ),
    # allocation
    Fault(
        "errors are weighted by norms instead of their squares",
        "dynamiq_jax/methods/_allocation.py",
        "energies = np.exp2(2 * (norms - norms.max()))",
        "energies = np.exp2(norms - norms.max())",
        ALLOCATION,
    ),
    Fault(
        "rare widths are kept",
        "dynamiq_jax/methods/_allocation.py",
        "best = fewer if error <= allowed else best",
        "best = fewer if error < 0 else best",
        ALLOCATION,
    ),
    Fault(
        "the mix of two allocations is the other way around",
        "dynamiq_jax/methods/_allocation.py",
        "shares = mix * over + (1 - mix) * under",
        "shares = (1 - mix) * over + mix * under",
        ALLOCATION,
    ),
    Fault(
        "norms of zero are measured",
        "dynamiq_jax/methods/_allocation.py",
        "norms = norms[np.isfinite(norms) & (norms > 0)]",
        "norms = np.maximum(norms[np.isfinite(norms)], 1e-30)",
        ALLOCATION,
    ),
    # choice of a backend
    Fault(
        "arrays beyond 32-bit indices go to kernels",
        "pallas_kernels/implementation.py",
        'small = all(getattr(leaf, "size", 1) < _INDEX_LIMIT for leaf in jax.tree.leaves(args))',
        "small = True",
        (KERNELS[0] + "::test_arrays_beyond_32_bit_indices_are_left_to_the_base",),
    ),
    Fault(
        "the newest GPU decides what the others run",
        "pallas_kernels/implementation.py",
        "capability = min(",
        "capability = max(",
        (KERNELS[0] + "::test_all_gpus_have_to_be_new_enough",),
    ),
    Fault(
        "kernels stay allowed after the context",
        "pallas_kernels/implementation.py",
        "_without_gpu.reset(token)",
        "pass",
        (KERNELS[0] + "::test_a_backend_that_cannot_run_is_refused_with_the_reason",),
    ),
    # Triton
    Fault(
        "the padding of a message is not written",
        TRITON + "message.py",
        "if layout.padding_start < layout.payload_bytes:",
        "if layout.padding_start > layout.payload_bytes:",
        (KERNELS[0] + "::test_blocks_of_any_size_write_every_byte",),
    ),
    Fault(
        "planes of 1 bit are read from the place of those of 2",
        TRITON + "message.py",
        "        low = rest & (8 - 2 * bits)  # bits of the larger planes before it",
        "        low = rest & (8 - 4 * bits)  # bits of the larger planes before it",
        HOP,
    ),
    Fault(
        "group scales of 8 lanes are stored in the wrong pieces",
        TRITON + "message.py",
        "at = (groups + count // 2 * piece)[:, None] + iota(count // 2)[None, :]",
        "at = (groups + piece)[:, None] + iota(count // 2)[None, :]",
        (HOP[0] + "[groups of 8-triton]",),
    ),
    Fault(
        "lanes 128 and up round like those before them",
        TRITON + "rows.py",
        "np.uint32(16 * (piece // 4))",
        "np.uint32(0)",
        HOP,
    ),
    Fault(
        "only the first of several messages is added",
        TRITON + "rows.py",
        "return decode(block, messages_ref, index * halves, pieces)",
        "return decode(block, messages_ref, 0, pieces)",
        (KERNELS[0] + "::test_any_number_of_messages_is_added",),
    ),
    Fault(
        "narrow gradients are added before they are widened",
        TRITON + "rows.py",
        "iota(LANES) + LANES * piece)[None, :]].astype(jnp.float32)",
        "iota(LANES) + LANES * piece)[None, :]].astype(jnp.bfloat16).astype(jnp.float32)",
        HOP,
    ),
    Fault(
        "blocks of a later class start at the rows of the first",
        TRITON + "blocks.py",
        "row = lax.min((program - first) * config.rows + iota(config.rows), rows - 1)",
        "row = lax.min(program * config.rows + iota(config.rows), rows - 1)",
        HOP,
    ),
    Fault(
        "rows are decoded to the places of the first chunk",
        TRITON + "kernels.py",
        "rows.scatter(pieces, rows_ref, order_ref[chunk, block.place])",
        "rows.scatter(pieces, rows_ref, order_ref[0, block.place])",
        (KERNELS[0] + "::test_rows_come_back_where_they_were",),
    ),
    Fault(
        "factors of norms may be subnormal",
        TRITON + "kernels.py",
        "unit = jnp.minimum(largest, LARGEST_UNIT)",
        "unit = largest",
        (KERNELS[0] + "::test_factors_of_norms_are_not_subnormal",),
    ),
    # Mosaic GPU
    Fault(
        "the last block is not moved back to end with its class",
        MOSAIC + "blocks.py",
        "first = lax.min((program - before) * rows, jnp.int32(c.rows - rows))",
        "first = (program - before) * rows",
        MOSAIC_GPU,
        equivalent=NO_MOSAIC,
    ),
    Fault(
        "lanes 128 and up round like those before them",
        MOSAIC + "blocks.py",
        "half_to_offset(words >> np.uint32(16))",
        "half_to_offset(words)",
        MOSAIC_GPU,
        equivalent=NO_MOSAIC,
    ),
    Fault(
        "local rows are left out of a sum",
        MOSAIC + "blocks.py",
        "pieces = [a + b for a, b in zip(pieces, decode(block, part), strict=True)]",
        "pieces = list(decode(block, part))",
        MOSAIC_GPU,
        equivalent=NO_MOSAIC,
    ),
    Fault(
        "the padding of a message is not written",
        MOSAIC + "blocks.py",
        "for byte in range(layout.padding_start, layout.payload_bytes):",
        "for byte in range(layout.payload_bytes, layout.payload_bytes):",
        MOSAIC_GPU,
        equivalent=NO_MOSAIC,
    ),
]
