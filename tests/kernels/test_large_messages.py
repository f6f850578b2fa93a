"""Messages of more than 2^31 bytes in all, decoded by the pure-JAX codec."""

import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from pallas_kernels import operations
from pallas_kernels.codec import LocalRows, Places, place_rows
from pallas_kernels.codec.scales import bfloat16_bits
from tests.support.machine import needs_memory

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

ROWS, CHUNKS = 2**17 + 2**10, 33  # the last message starts behind 2^31 bytes
METHOD = dq.DynamiQ(bits=16.0, rounding="nearest")


def test_every_message_is_decoded():
    """All chunks hold the same, so the last one has the bits of the first."""
    needs_memory(10)
    one = METHOD.layout(256 * ROWS, 1)
    rows = np.random.default_rng(0).standard_normal((ROWS, 256), np.float32)
    norms = bfloat16_bits(operations.by("xla").statistics(jnp.asarray(rows)))
    of_one = place_rows(norms, one)
    local = LocalRows(jnp.asarray(rows), of_one, jnp.zeros(2, jnp.uint32))
    message = operations.compress(local, 0, 0, layout=one, implementation="xla")
    layout = METHOD.layout(256 * ROWS * CHUNKS, CHUNKS)
    assert layout.payload_bytes == message.size and (CHUNKS - 1) * message.size >= 2**31
    order = np.asarray(of_one.order) + ROWS * np.arange(CHUNKS, dtype=np.int32)[:, None]
    places = Places(
        jnp.asarray(order),
        *(jnp.tile(part, (CHUNKS, 1)) for part in (of_one.widths, of_one.starts)),
    )
    messages = jnp.tile(message, (CHUNKS, 1))
    del local, message
    found = np.asarray(operations.by("xla").decompress(messages, places, layout=layout))
    first, last = found[:ROWS], found[-ROWS:]
    assert np.array_equal(first, last)
    np.testing.assert_allclose(first, rows, rtol=0, atol=1e-3)
