"""Bytes of the MX formats, against gfloat and torchao.

Ours are those of the standard's text: the scale is 2^(floor(log2 amax) - emax), which torchao calls
FLOOR, elements are rounded to nearest even and saturate.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax.methods import MXFP4, MXFP6, MXFP8, MXINT8
from tests.support.others import package

gfloat = package("gfloat")
package("gfloat.formats")

# Method, and the name that torchao has for the elements.
FORMATS = {
    "mxfp8_e4m3": (MXFP8(), "float8_e4m3fn"),
    "mxfp8_e5m2": (MXFP8(element="e5m2"), "float8_e5m2"),
    "mxfp6_e2m3": (MXFP6(), "fp6_e2m3"),
    "mxfp6_e3m2": (MXFP6(element="e3m2"), "fp6_e3m2"),
    "mxfp4_e2m1": (MXFP4(), "float4_e2m1fn_x2"),
    "mxint8": (MXINT8(), None),
}
BLOCK, ROWS = 32, 64


def format_of(name):
    return getattr(gfloat.formats, f"format_info_{name}").etype


def largest_exponent(name) -> float:
    return np.floor(np.log2(format_of(name).max))


def values(name) -> np.ndarray:
    """Blocks [blocks, 32] of many magnitudes, zeros, all codes and ties, and what saturates."""
    rng = np.random.default_rng(0)
    blocks = rng.normal(size=(8 * ROWS, BLOCK)) * np.exp2(rng.integers(-60, 60, (8 * ROWS, 1)))
    blocks[:8] = 0
    blocks[8:16] = 1
    blocks[16:24, ::2] = 0
    codes = [gfloat.decode_float(format_of(name), c).fval for c in range(2 ** format_of(name).k)]
    codes = np.unique([code for code in codes if np.isfinite(code)])
    ties = (codes[1:] + codes[:-1]) / 2
    blocks[24:200] = np.resize([*codes, *ties], (176, BLOCK))
    blocks[24:200, 0] = codes.max()
    blocks[200:280] = rng.uniform(1, 2, (80, BLOCK)) * rng.choice([-1, 1], (80, BLOCK))
    blocks[280:288] = 3e38 * rng.uniform(-1, 1, (8, BLOCK))
    blocks[288:296] = 1e-37 * rng.uniform(1, 2, (8, BLOCK))
    return blocks.astype(np.float32)


def ours(name, blocks) -> tuple[np.ndarray, np.ndarray]:
    """Codes [blocks, 32] and scales [blocks]."""
    codes, scales = FORMATS[name][0].encode_rows(jnp.asarray(blocks.reshape(-1, 256)), None)
    return np.asarray(codes).reshape(blocks.shape), np.asarray(scales).reshape(-1)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_gfloat(name):
    blocks = values(name)
    codes, scales = ours(name, blocks)
    exact, kind = blocks.astype(np.float64), format_of(name)
    theirs = np.array([gfloat.compute_scale_amax(largest_exponent(name), b) for b in exact])
    np.testing.assert_array_equal(scales, np.log2(theirs) + 127)
    rounded = gfloat.round_ndarray(kind, exact / theirs[:, None], gfloat.RoundMode.TiesToEven, True)
    expected = gfloat.encode_ndarray(kind, rounded)
    if name == "mxint8":
        # The standard leaves -128 to the implementation: gfloat writes it, and we never do.
        assert np.any(expected == 128) and not np.any(codes == 128)
        expected = np.where(expected == 128, 129, expected)
    np.testing.assert_array_equal(codes, expected)


def by_torchao(name, blocks, mode) -> tuple[np.ndarray, np.ndarray]:
    torch = package("torch")
    mx = package("torchao.prototype.mx_formats.mx_tensor")
    kind = getattr(torch, FORMATS[name][1], FORMATS[name][1])
    data = torch.tensor(blocks.reshape(-1, 256))
    scales, codes = mx.to_mx(data, kind, BLOCK, mx.ScaleCalculationMode[mode])
    codes = codes.view(torch.uint8).numpy()
    if name == "mxfp4_e2m1":  # two in a byte
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    return codes.reshape(-1, BLOCK), scales.view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize("name", list(FORMATS)[:-1])
def test_bytes_are_those_of_torchao_with_floor_scales(name):
    blocks = values(name)
    codes, scales = ours(name, blocks)
    their_codes, their_scales = by_torchao(name, blocks, "FLOOR")
    np.testing.assert_array_equal(scales, their_scales)
    # torchao divides by 2^-126 where the byte says 2^-127, which float32 holds as a subnormal.
    normal = scales > 0
    assert 0.9 < normal.mean() < 1
    np.testing.assert_array_equal(codes[normal], their_codes[normal])


@pytest.mark.parametrize("mode", ["RCEIL", "CEIL", "EVEN"])
def test_other_scales_of_torchao_are_larger(mode):
    """They avoid saturation, and are not the standard's."""
    blocks = values("mxfp4_e2m1")
    blocks = blocks[np.abs(blocks).max(axis=1) > 1e-30]
    scales, theirs = ours("mxfp4_e2m1", blocks)[1], by_torchao("mxfp4_e2m1", blocks, mode)[1]
    above = theirs.astype(int) - scales
    assert set(above) == {0, 1} and np.mean(above) > 0.1


def test_a_block_with_nan_is_nan_in_torchao_too():
    """The standard leaves Inf open: torchao saturates it, and ours is NaN, which surfaces."""
    blocks = np.ones((8, BLOCK), np.float32)
    blocks[0, 3], blocks[1, 4] = np.nan, np.inf
    scales, theirs = ours("mxfp8_e4m3", blocks)[1], by_torchao("mxfp8_e4m3", blocks, "FLOOR")[1]
    assert list(scales[:3] == 255) == [True, True, False]
    assert list(theirs[:3] == 255) == [True, False, False]
    np.testing.assert_array_equal(scales[2:], theirs[2:])
