"""Packet loss: the channel, the bytes that coordinates depend on, and laws of both exchanges."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import resolve_method
from dynamiq_research import LossyChannel, LossyCollectives, PowerSGD, drift, expected_drift
from dynamiq_research.packet_loss import ByteSpans, terms_of
from tests.support.workers import STOCHASTIC, TWO_WIDTHS, call_on, on_mesh, simulated

KEY = jax.random.key(11)
FLOATS = 4  # in a packet of 16 bytes
ESTIMATORS = ("others", "count", "inverse")
EVERY_LEAF = dq.Compression(exact_below=0)


def lossy(rate=0.1, **fields) -> LossyCollectives:
    """Collectives whose packets hold four floats."""
    channel = LossyChannel(rate=rate, packet_bytes=16)
    defaults = {"axis_name": "data", "channel": channel, "method": "exact"}
    return LossyCollectives(**{**defaults, **fields})


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


# The channel


@pytest.mark.slow
def test_packets_are_lost_at_the_rate_and_independently():
    arrived = np.asarray(LossyChannel(rate=0.1).arrived(KEY, 4, 2, 20_000))
    assert arrived[2].all()  # to itself
    lost = ~arrived[[0, 1, 3]]
    assert abs(lost.mean() - 0.1) < 5 * np.sqrt(0.09 / lost.size)
    pairs = (lost[:, 1:] & lost[:, :-1]).mean()
    assert abs(pairs - 0.01) < 5 * np.sqrt(0.01 / lost.size)
    between_senders = (lost[0] & lost[1]).mean()
    assert abs(between_senders - 0.01) < 5 * np.sqrt(0.01 / len(lost[0]))


@pytest.mark.parametrize(("rate", "burst"), [(0.1, 5.0), (0.3, 2.0)])
@pytest.mark.slow
def test_bursts_have_their_mean_length_at_the_same_rate(rate, burst):
    channel = LossyChannel(rate=rate, burst=burst)
    lost = ~np.asarray(channel.arrived(KEY, 9, 8, 40_000))[:8]
    # Runs last `burst` packets: fewer independent draws than packets.
    deviation = np.sqrt(rate * (1 - rate) * 2 * burst / lost.size)
    assert abs(lost.mean() - rate) < 5 * deviation
    runs = (lost[:, 1:] & ~lost[:, :-1]).sum() + lost[:, 0].sum()
    mean = lost.sum() / runs
    assert abs(mean - burst) < 5 * burst / np.sqrt(runs)
    first = ~np.asarray(jax.vmap(lambda k: channel.arrived(k, 2, 0, 1)[1, 0])(keys(4000)))
    assert abs(first.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / 4000)


def keys(number):
    return jax.random.split(KEY, number)


@pytest.mark.slow
def test_every_pair_of_workers_loses_other_packets():
    channel = LossyChannel(rate=0.5)
    masks = [channel.arrived(KEY, 4, receiver, 64) for receiver in range(4)]
    others = [
        mask[sender]
        for receiver, mask in enumerate(masks)
        for sender in range(4)
        if sender != receiver
    ]
    agree = np.array([[(a == b).mean() for a in others] for b in others])
    assert (agree[~np.eye(12, dtype=bool)] < 0.85).all()
    again = channel.arrived(KEY, 4, 0, 64)
    assert (again == masks[0]).all()


@pytest.mark.slow
def test_nothing_or_all_is_lost_at_the_ends_of_the_range():
    assert LossyChannel(rate=0.0).arrived(KEY, 3, 0, 500).all()
    assert LossyChannel(rate=0.0, burst=9).arrived(KEY, 3, 0, 500).all()
    nothing = LossyChannel(rate=1.0).arrived(KEY, 3, 1, 500)
    np.testing.assert_array_equal(nothing.sum(axis=1), [0, 500, 0])


RATES = np.array([[1.0, 0.5, 0.2], [0.1, 1.0, 0.0], [0.0, 0.3, 1.0]])  # [sender, receiver]


@pytest.mark.parametrize("burst", [None, 3.0])
@pytest.mark.slow
def test_links_have_rates_of_their_own(burst):
    channel = LossyChannel(rate=RATES, burst=burst)
    assert channel == LossyChannel(rate=RATES.tolist(), burst=burst)
    arrived = jax.vmap(lambda receiver: channel.arrived(KEY, 3, receiver, 20_000))(jnp.arange(3))
    found = 1 - np.asarray(arrived).mean(axis=2).T
    wanted = np.where(np.eye(3), 0, RATES)
    deviation = np.sqrt(wanted * (1 - wanted) * 2 * (burst or 1) / 20_000)
    assert (np.abs(found - wanted) <= 5 * deviation).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": [[0.0, 2.0], [0.0, 0.0]]}, r"rate\[0\]\[1\]=2.0"),
        ({"rate": [[0.0, 0.1]]}, r"rate=.* square table"),
        ({"rate": [[0.0, 0.1], [0.0]]}, r"rate=.* square table"),
        ({"rate": "high"}, "rate='high' is neither a number"),
        ({"rate": [[0.0, 0.8], [0.0, 0.0]], "burst": 3.0}, "burst=3.0.* = 5"),
        ({"rate": 1.5}, "rate=1.5"),
        ({"rate": -0.1}, "rate=-0.1"),
        ({"rate": 0.5, "burst": 1.9}, "burst=1.9.* = 2"),
        ({"rate": 1.0, "burst": 3.0}, "everything is lost"),
        ({"burst": float("inf")}, "burst=inf"),
        ({"packet_bytes": 100}, "packet_bytes=100.*multiple of 16"),
        ({"packet_bytes": 0}, "packet_bytes=0"),
    ],
)
def test_a_channel_that_is_not_possible(fields, message):
    with pytest.raises(ValueError, match=message):
        LossyChannel(**fields)


def test_rates_of_links_are_of_as_many_workers_as_the_axis():
    with pytest.raises(ValueError, match=r"between 3 workers.*has 4.*\[4\]\[4\]"):
        LossyChannel(rate=RATES).arrived(KEY, 4, 0, 10)


# Bytes that coordinates depend on

CODECS = {
    "exact": (resolve_method("exact"), 10),
    "bf16": (resolve_method("bf16"), 21),
    "dynamiq": (dq.DynamiQ(bits=5.0), 256 * 6),
    "dynamiq with rows of no bits": (dq.DynamiQ(bits=2.6, widths=(0, 2, 8)), 256 * 6),
    "blockint": (resolve_method("blockint:6"), 256 * 2),
    "mxfp6": (resolve_method("mxfp6"), 256 * 2),
    "flash": (resolve_method("flash_communication:3:spikes=False"), 256 * 2),
    "thc": (resolve_method("thc:block=256"), 256 * 2),
    "marsit": (resolve_method("marsit"), 256 * 3),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("exact", "dynamiq", "thc") else pytest.mark.slow)
        for n in CODECS
    ],
)
@pytest.mark.slow
def test_a_group_depends_on_the_bytes_of_its_spans_and_on_no_others(name):
    """Each byte is turned in turn. Exactly the groups that have it in a span decode to others."""
    method, size = CODECS[name]
    call = call_on(2 * size, 2, "all_to_all", collective="psum_scatter")
    # Rows of other magnitudes, so that there are several widths. No zeros, whose sign decoding may
    # lose.
    values = jnp.sign(normal(2, 2 * size)) * (1 - 0.1 * jnp.abs(jnp.sin(normal(2, 2 * size))))
    by_row = 2.0 ** (3 * normal(2, -(-2 * size // 256), seed=2))
    values = values * jnp.repeat(by_row, 256, axis=1)[:, : 2 * size]

    def local(values):
        codec, chunk = method.bind(values, call, KEY), jnp.int32(1)
        parts = terms_of(method, codec)
        leaves, structure = jax.tree.flatten(codec.compress(chunk, 0))
        in_bytes = [lax.bitcast_convert_type(leaf, jnp.uint8).reshape(-1) for leaf in leaves]
        data = jnp.concatenate(in_bytes)

        def decoded(data):
            words = []
            for leaf, stop in zip(leaves, np.cumsum([part.size for part in in_bytes]), strict=True):
                item = leaf.dtype.itemsize
                own = data[stop - leaf.size * item : stop].reshape(*leaf.shape, item)
                own = own if item > 1 else own[..., 0]
                words.append(lax.bitcast_convert_type(own, leaf.dtype))
            terms = parts.terms(jax.tree.unflatten(structure, words), chunk)
            return lax.bitcast_convert_type(terms, jnp.uint32)

        spans = parts.byte_spans(chunk)

        def changes(at):
            changed = decoded(data.at[at].set(data[at] ^ np.uint8(0xFF))) != decoded(data)
            return jnp.any(changed.reshape(len(spans.starts), -1), axis=1)

        together = spans.side_by_side()
        limit = jnp.int32(min(spans.size, together.size))
        ends = spans.starts, spans.stops, together.starts, together.stops, limit
        return lax.map(changes, jnp.arange(data.size)), *ends

    of_workers = jax.jit(jax.vmap(local, axis_name="data"))(values)
    found, starts, stops, *together, limit = (np.asarray(each[0]) for each in of_workers)
    at = np.arange(len(found))[:, None, None]
    wanted = ((starts <= at) & (at < stops)).any(axis=2)
    # A row of no bits has a super-scale, which matters only if it is NaN.
    has_codes = (wanted.sum(axis=0) > 2) | (name == "bf16")
    assert not found[~wanted].any()
    np.testing.assert_array_equal(found[:, has_codes], wanted[:, has_codes])
    assert has_codes.all() == (name != "dynamiq with rows of no bits")
    after = np.cumsum((stops - starts).sum(axis=1))
    np.testing.assert_array_equal(together, [[*zip([0, *after[:-1]])], [*zip(after)]])
    assert after[-1] <= limit


@given(data=st.data())
@pytest.mark.slow
def test_a_group_is_intact_if_all_packets_of_its_bytes_arrived(data):
    size = data.draw(st.integers(1, 200))
    channel = LossyChannel(packet_bytes=16 * data.draw(st.integers(1, 3)))
    packets = channel.num_packets(size)
    arrived = np.array(data.draw(st.lists(st.booleans(), min_size=packets, max_size=packets)))
    end = st.integers(0, size)
    spans = st.tuples(end, end).map(sorted)
    ends = np.array(
        data.draw(st.lists(st.lists(spans, min_size=2, max_size=2), min_size=7, max_size=7)),
        np.int32,
    )
    found = channel.intact(ByteSpans(ends[..., 0], ends[..., 1], size), jnp.asarray(arrived))
    byte_arrived = np.repeat(arrived, channel.packet_bytes)
    wanted = [all(byte_arrived[a:b].all() for a, b in group) for group in ends]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("burst", [None, 2.5])
@pytest.mark.slow
def test_the_chance_of_a_group_is_how_often_it_is_intact(burst):
    """With spans that overlap, share packets, leave some out, or hold no byte."""
    rates = [[0, 0.1, 0.3], [0.2, 0, 0.3], [0.4, 0.6, 0]]
    channel = LossyChannel(rate=rates, burst=burst, packet_bytes=16)
    starts = [[0, 0, 0], [0, 70, 20], [40, 16, 0], [5, 5, 5], [64, 90, 0], [130, 0, 64]]
    stops = [[16, 0, 0], [33, 80, 60], [99, 50, 0], [5, 5, 5], [65, 96, 0], [144, 1, 70]]
    spans = ByteSpans(jnp.array(starts), jnp.array(stops), 144)

    def drawn(key):
        return jax.vmap(lambda each: channel.intact(spans, each))(channel.arrived(key, 3, 2, 9))

    found = np.asarray(jax.jit(jax.vmap(drawn))(keys(20_000))).mean(axis=0)[:2]
    wanted = np.asarray(channel.chance_intact(spans, 3, 2))[:2]
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / 20_000)).all()
    np.testing.assert_allclose(wanted[:, 0], 0.7, rtol=1e-6)  # one packet
    assert (wanted[:, 3] == 1).all() and (wanted[:, 1] < 0.6).all()


# Estimates of the mean


@functools.cache
def estimates(estimator, rate, num_workers, method="exact", number=4000):
    """Gradients [workers, size], and estimates of the owners' parts with many keys."""
    size = 16 * num_workers
    gradients = normal(num_workers, size) + 1
    channel = LossyChannel(rate=rate, packet_bytes=16)
    of = lossy(
        channel=channel, estimator=estimator, method=dataclasses.replace(EVERY_LEAF, method=method)
    )
    local = jax.vmap(
        lambda key, g: of.scatter_mean(g, key=key), axis_name="data", in_axes=(None, 0)
    )
    found = jax.jit(jax.vmap(local, in_axes=(0, None)))(keys(number), gradients)
    return np.asarray(gradients), np.asarray(found).reshape(number, size)


def own_values(gradients):
    parts = gradients.reshape(len(gradients), len(gradients), -1)
    return np.stack([parts[worker, worker] for worker in range(len(gradients))]).reshape(-1)


def check_mean(found, wanted):
    """Means over keys, within five standard errors of each coordinate."""
    error = found.std(axis=0) / np.sqrt(len(found))
    assert (error > 0).all()
    assert (np.abs(found.mean(axis=0) - wanted) < 5 * error).all()


@pytest.mark.parametrize(
    ("estimator", "method"),
    [
        ("others", "exact"),
        pytest.param("inverse", "exact", marks=pytest.mark.slow),
        pytest.param("others", "bf16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_the_mean_estimate_is_the_mean_gradient(estimator, method):
    gradients, found = estimates(estimator, 0.1, 8, method)
    if method == "bf16":  # own values are not rounded
        rounded = gradients.astype(jnp.bfloat16).astype(np.float32)
        mean = rounded.mean(axis=0) + own_values(gradients - rounded) / 8
    else:
        mean = gradients.mean(axis=0)
    check_mean(found, mean)


@pytest.mark.slow
def test_the_inverse_estimate_of_rows_in_several_packets():
    """Unbiased with other rates on each link, where the two rows of a message lie in packets 0 to 2
    and 1 to 2.
    """
    rates = [[0, 0.1, 0.2], [0.3, 0, 0.1], [0.05, 0.2, 0]]
    gradients = normal(3, 3 * 512)

    def local(key, g, rate):
        channel = LossyChannel(rate=rate, packet_bytes=192)
        of = lossy(
            channel=channel,
            estimator="inverse",
            method=dataclasses.replace(EVERY_LEAF, method="mxfp8"),
        )
        return of.scatter_mean(g, key=key)

    def of_all(key, rate):
        run = functools.partial(local, rate=rate)
        return jax.vmap(run, axis_name="data", in_axes=(None, 0))(key, gradients)[:, ::128]

    found = jax.jit(jax.vmap(lambda key: of_all(key, rates)))(keys(2000))
    check_mean(np.asarray(found), np.asarray(jax.jit(lambda key: of_all(key, 0.0))(KEY)))


@pytest.mark.slow
def test_where_no_other_arrives_the_own_gradient_counts_alone():
    """The bias of "others" is the chance of that, here 1/8."""
    gradients, found = estimates("others", 0.5, 4)
    check_mean(found, 7 / 8 * gradients.mean(axis=0) + own_values(gradients) / 8)


@pytest.mark.slow
def test_the_mean_of_what_arrives_weights_the_own_gradient_more():
    """(1 - .1**8) / (8 * .9) = .1389 instead of .125, the paper's estimator."""
    gradients, found = estimates("count", 0.1, 8)
    weight = (1 - 0.1**8) / (8 * 0.9)
    assert abs(weight - 0.1389) < 1e-4
    own = own_values(gradients)
    others = (gradients.sum(axis=0) - own) / 7
    check_mean(found, weight * own + (1 - weight) * others)
    unbiased = np.abs(found.mean(axis=0) - gradients.mean(axis=0))
    assert (unbiased > 5 * found.std(axis=0) / np.sqrt(len(found))).any()


@pytest.mark.slow
def test_a_constant_is_its_own_mean_unless_the_rate_divides():
    """Where all workers agree, "others" and "count" have no error, and "inverse" has its law."""
    same = jnp.full((8, 4096), 3.0)

    def local(key, g):
        return {e: lossy(estimator=e).scatter_mean(g, key=key) for e in ESTIMATORS}

    found = simulated(local)(KEY, same)
    errors = {name: float(jnp.mean((each / 3 - 1) ** 2)) for name, each in found.items()}
    assert errors["others"] < 1e-12 and errors["count"] < 1e-12
    law = 7 / 64 * 0.1 / 0.9  # p / (1 - p) for each of 7 others, of weight 1/8
    assert abs(errors["inverse"] / law - 1) < 5 * np.sqrt(2 / 1024)


TREE = {
    "w": normal(4, 32, 65),
    "b": normal(4, 7, seed=1),
    "h": normal(4, 1030, seed=2).astype("bfloat16"),
}


@pytest.mark.parametrize("method", ["thc"])
@pytest.mark.slow
def test_without_loss_it_is_the_mean_of_the_reduce_scatter(method):
    """Bit-identical. A channel that could lose packets, but does not, adds in another order."""

    def local(key, tree):
        rows = jax.tree.map(lambda x: jnp.pad(x.reshape(-1), (0, -x.size % 4)).reshape(4, -1), tree)
        sums = dq.psum_scatter(rows, "data", key=key, method=dq.Compression(method, "all_to_all"))
        wanted = jax.tree.map(lambda x: x * jnp.asarray(0.25, x.dtype), sums)
        of = [lossy(rate, method=method) for rate in (0.0, 1e-12)]
        return [each.scatter_mean(tree, key=key) for each in of], wanted

    (found, nearly), wanted = simulated(local)(KEY, TREE)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf)
        tolerance = 1e-2 if name == "h" else 1e-5
        np.testing.assert_allclose(nearly[name], leaf, rtol=tolerance, atol=tolerance)
    assert jax.tree.map(jnp.shape, found) == {"w": (4, 520), "b": (4, 2), "h": (4, 258)}


@pytest.mark.parametrize("method", ["bf16", "thc", "marsit", "entropy_coded:agreement=0.1"])
def test_values_of_all_terms_are_those_of_the_sum(method):
    """In a reduce-scatter, of every family of codecs."""
    call = call_on(2048, 4, "all_to_all", collective="psum_scatter")

    def local(key, flat):
        codec = resolve_method(method).bind(flat, call, key)
        parts = terms_of(resolve_method(method), codec)
        messages, chunk, _ = call.topology.arrival(codec, call.axis)
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], messages) for i in range(3)]
        terms = parts.local_terms(chunk) + sum(parts.terms(one, chunk) for one in each)
        return codec.accumulate(messages, chunk), parts.values_of_terms(terms, chunk)

    sums, values = simulated(local)(KEY, normal(4, 2048))
    np.testing.assert_allclose(values, sums, rtol=1e-5, atol=1e-5)


def test_one_worker_has_its_own_gradient():
    alone = lossy(0.5).scatter_mean
    found = simulated(lambda key, g: alone(g, key=key))(KEY, normal(1, 100))
    np.testing.assert_array_equal(found, normal(1, 100))


@pytest.mark.slow
def test_if_all_is_lost_the_own_gradient_is_left():
    """Those of others are not finite, which does not show."""
    is_own = (jnp.arange(4096) // 1024)[None, :] == jnp.arange(4)[:, None]
    gradients = jnp.where(is_own, normal(4, 4096), jnp.nan)
    of = lossy(1.0, method="bf16")
    both = simulated(lambda key, g: (of.scatter_mean(g, key=key), of.own_parts(g)))
    found, own = both(KEY, gradients)
    assert (found == own).all() and jnp.isfinite(own).all()


@pytest.mark.slow
def test_a_message_that_is_not_mapped_to_packets_is_lost_whole():
    """Each part is the own one, or the mean of both, as it was sent in many packets."""
    signs = jnp.stack([jnp.ones(8192), -jnp.ones(8192)])
    of = lossy(channel=LossyChannel(rate=0.002, packet_bytes=16), method=STOCHASTIC)
    local = jax.vmap(
        lambda key, g: of.scatter_mean(g, key=key), axis_name="data", in_axes=(None, 0)
    )
    found = np.asarray(jax.jit(jax.vmap(local, in_axes=(0, None)))(keys(200), signs))
    assert (found == found[..., :1]).all() and set(np.unique(found)) == {-1, 0, 1}
    chance = 0.998**512
    assert abs((found[..., 0] == 0).mean() - chance) < 5 * np.sqrt(chance * (1 - chance) / 400)


@pytest.mark.slow
def test_lost_packets_of_thc_leave_out_integers_before_they_are_rotated_back():
    """So the error of a lost row is spread over all rows of its block."""
    gradients = normal(8, 8 * 4096)
    channel = LossyChannel(rate=0.1, packet_bytes=128)
    of = lossy(channel=channel, method=dataclasses.replace(EVERY_LEAF, method="thc:block=4096"))
    found = simulated(lambda key, g: of.scatter_mean(g, key=key))(KEY, gradients)
    error = np.asarray(found).reshape(8, 16, 256) - np.asarray(gradients.mean(axis=0)).reshape(
        8, 16, 256
    )
    of_rows = np.mean(error**2, axis=2)
    assert (of_rows.max(axis=1) < 2 * of_rows.min(axis=1)).all()
    # 7 bits are planes of 4, 2 and 1: a row lies in 3 packets. The mean of k of 7 normal values
    # differs from that of all by 1/k - 1/7, which has the weight 7/8.
    arrives = 0.9**3
    law = (7 / 8) ** 2 * sum(
        math.comb(7, k) * arrives**k * (1 - arrives) ** (7 - k) * (1 / k - 1 / 7)
        for k in range(1, 8)
    )
    assert 0.6 * law < of_rows.mean() < 1.5 * law


def test_what_is_not_finite_surfaces_where_it_arrives_and_only_there():
    gradients = normal(4, 4096).at[0, 2048:].set(jnp.nan)  # of owners 2 and 3
    of = lossy(0.5, method=dataclasses.replace(EVERY_LEAF, method="exact"))
    found = simulated(lambda key, g: of.scatter_mean(g, key=key))(KEY, gradients)
    is_nan = np.isnan(found).reshape(4, -1, FLOATS)
    assert not is_nan[:2].any()
    assert (is_nan[2:].all(axis=2) == is_nan[2:].any(axis=2)).all()  # packets
    assert abs(is_nan[2:].mean() - 0.5) < 5 * np.sqrt(0.25 / 512)


@pytest.mark.parametrize(
    ("together", "low", "high"),
    [(False, 0.12, 0.35), pytest.param(True, 0.03, 0.12, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_messages_of_dynamiq_lose_rows_and_no_others(together, low, high):
    """A row is that of the reduce-scatter, or the own one, whole. NaN enters with its row alone."""
    gradients = normal(2, 256 * 64).at[1, 256 * 8].set(jnp.nan)  # of owner 0
    channel = LossyChannel(rate=0.02, packet_bytes=64)
    of = lossy(
        channel=channel,
        rows_together=together,
        method=dataclasses.replace(EVERY_LEAF, method=TWO_WIDTHS),
    )

    def local(key, g):
        sums = dq.psum_scatter(
            g, "data", key=key, tiled=True, method=dq.Compression(TWO_WIDTHS, "all_to_all")
        )
        return of.scatter_mean(g, key=key), sums / 2, of.own_parts(g)

    masked = [np.asarray(part).reshape(2, -1, 256) for part in simulated(local)(KEY, gradients)]
    found, whole, own = masked
    is_own = (found == own).all(axis=2)
    is_whole = np.isclose(found, whole, rtol=1e-5, atol=1e-5, equal_nan=True).all(axis=2)
    assert (is_own ^ is_whole).all()
    assert np.isnan(whole[0, 8]).all() and is_whole[0, 8] != is_own[0, 8]
    # A row lies in one packet for each plane and two of its scales, or in about 4 in a row.
    assert low < is_own.mean() < high


# Parameters that are broadcast


def walk(of, num_workers, steps, size, *, updates=False, seed=0):
    """Drift by step of parameters that are a random walk, broadcast by their owners."""
    others = of_pairs_without_owner(num_workers, size)

    def step(theta, inputs):
        key, _ = inputs
        truth, copies = theta
        change = jax.random.normal(jax.random.fold_in(key, 7), (size,))
        truth = truth + change
        sent = change if updates else truth
        kept = jnp.zeros_like(copies) if updates else copies

        def local(kept):
            return of.broadcast(of.own_parts(sent), kept, key=key)

        arrived = jax.vmap(local, axis_name="data")(kept)
        copies = copies + arrived if updates else arrived
        of_all = jax.vmap(lambda x: drift(x, "data"), axis_name="data")(copies)
        return (truth, copies), (of_all[0], others(copies))

    start = jnp.zeros(size), jnp.zeros((num_workers, size))
    inputs = jax.random.split(jax.random.key(seed), steps), jnp.arange(steps)
    _, found = jax.jit(lambda start, inputs: lax.scan(step, start, inputs))(start, inputs)
    return tuple(np.asarray(each) for each in found)


def of_pairs_without_owner(num_workers, size):
    """Mean squared difference of the two workers after each owner, of its part."""
    owner = np.arange(size) // (size // num_workers)
    one, other = (owner + 1) % num_workers, (owner + 2) % num_workers
    at = np.arange(size)
    return lambda copies: jnp.mean((copies[one, at] - copies[other, at]) ** 2)


@pytest.mark.parametrize("rate", [0.1, 0.3])
@pytest.mark.slow
def test_parameters_drift_by_the_law_and_no_further(rate):
    """2 p / (1 - p**2) of the variance of a step between two workers that do not own it."""
    of_all, of_others = walk(lossy(rate), 8, 700, 2048)
    settled = slice(50, None)
    law = 2 * rate / (1 - rate**2)
    assert abs(of_others[settled].mean() / law - 1) < 0.03
    assert abs(of_all[settled].mean() / expected_drift(rate, 8) - 1) < 0.03
    early, late = of_all[50:375].mean(), of_all[375:].mean()
    assert abs(late / early - 1) < 0.03


def test_a_mean_step_adds_its_share_to_the_drift():
    """With steps that are all the same, drift is the variance of the age of a value."""
    of, size, rate = lossy(0.3), 4096, 0.3

    def step(copies, inputs):
        number, key = inputs
        truth = jnp.full((size,), number.astype(jnp.float32))
        copies = jax.vmap(
            lambda c: of.broadcast(of.own_parts(truth), c, key=key), axis_name="data"
        )(copies)
        return copies, jax.vmap(lambda x: drift(x, "data"), axis_name="data")(copies)[0]

    start = jnp.zeros((4, size))
    _, found = jax.jit(lambda s, i: lax.scan(step, s, i))(start, (jnp.arange(200), keys(200)))
    law = expected_drift(rate, 4, variance=0.0, mean=1.0)
    assert abs(np.asarray(found)[40:].mean() / law - 1) < 0.03


@pytest.mark.slow
def test_broadcast_updates_drift_without_bound():
    """The contrast: what is missed is never made up for, 2 p (1 - p) of the variance a step."""
    _, of_others = walk(lossy(0.1), 4, 200, 8192, updates=True)
    law = 2 * 0.1 * 0.9 * np.arange(1, 201)
    assert abs(of_others[199] / law[199] - 1) < 0.15
    assert abs(of_others[49] / law[49] - 1) < 0.15


def test_one_step_without_loss_heals_all():
    params = normal(4, 1000)

    def local(key, x):
        lossy_step = lossy(0.9).broadcast(lossy(0.9).own_parts(x), x, key=key)
        healed = lossy(0.0).broadcast(lossy(0.0).own_parts(lossy_step), lossy_step, key=key)
        return drift(lossy_step, "data"), drift(healed, "data"), healed, lossy(0.0).own_parts(x)

    before, after, healed, own = simulated(local)(KEY, params)
    assert before.min() > 0.1 and (after == 0).all()
    assert (healed == own.reshape(1, -1)[:, :1000]).all()


@pytest.mark.slow
def test_values_that_do_not_arrive_stay_and_the_own_ones_are_always_new():
    tree = {"w": normal(4, 10, 13), "h": normal(4, 37, seed=5).astype("bfloat16"), "s": normal(4)}
    zeros = jax.tree.map(jnp.zeros_like, tree)

    def local(key, tree, zeros, of):
        return of.broadcast(of.own_parts(tree), zeros, key=key), of.own_parts(tree)

    nothing, _ = simulated(functools.partial(local, of=lossy(1.0)))(KEY, tree, zeros)
    some, own = simulated(functools.partial(local, of=lossy(0.4)))(KEY, tree, zeros)
    everything, _ = simulated(functools.partial(local, of=lossy(0.0)))(KEY, tree, zeros)
    for name, parts in own.items():
        leaf = tree[name]
        size = leaf[0].size
        owner = np.arange(size) // parts.shape[1]
        new = np.asarray(parts.reshape(-1)[:size])
        flat = {
            k: np.asarray(v[name].reshape(4, size))
            for k, v in {"none": nothing, "some": some, "all": everything}.items()
        }
        mine = owner == np.arange(4)[:, None]
        np.testing.assert_array_equal(flat["none"], np.where(mine, new, 0))
        np.testing.assert_array_equal(flat["all"], np.broadcast_to(new, (4, size)))
        assert (flat["some"][mine] == np.broadcast_to(new, (4, size))[mine]).all()
        is_new, is_old = flat["some"] == new, flat["some"] == 0
        assert (is_new ^ is_old).all() and some[name].dtype == leaf.dtype
    assert 0.2 < np.mean([(some["w"] == 0).mean(), (some["h"] == 0).mean()]) < 0.5


@pytest.mark.slow
def test_gradients_and_parameters_lose_other_packets():
    """With one key for both."""
    ones = jnp.ones((2, 8192))
    of = lossy(0.5, estimator="inverse")

    def local(key, g):
        return of.scatter_mean(g, key=key), of.broadcast(of.own_parts(g), 0 * g, key=key)

    mean, params = simulated(local)(KEY, ones)
    lost_gradient = np.asarray(mean[0]) < 1  # sent by worker 1 to 0
    lost_parameter = np.asarray(params[0, 4096:]) == 0  # also by worker 1 to 0
    agree = (lost_gradient == lost_parameter).reshape(-1, FLOATS).mean()
    assert abs(agree - 0.5) < 5 * np.sqrt(0.25 / 1024)


# Both ways to run it


@pytest.mark.slow
def test_devices_and_simulated_workers_get_the_same(data_mesh):
    channel = LossyChannel(rate=0.3, burst=3.0, packet_bytes=64)
    of = LossyCollectives(axis_name="data", channel=channel, method=TWO_WIDTHS)

    def local(key, tree):
        mean = of.scatter_mean(tree, key=key)
        new = of.broadcast(mean, tree, key=key)
        return mean, new, drift(new, "data")

    tree = {"w": normal(2, 32, 65), "b": normal(2, 7, seed=1)}
    found = on_mesh(local, data_mesh(2))(KEY, tree)
    for one, other in zip(*map(jax.tree.leaves, (found, simulated(local)(KEY, tree))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_drift_is_the_mean_over_pairs():
    x = normal(5, 3, 7)
    tree = {"a": x, "b": x[:, 0, :2].astype("bfloat16")}
    flat = np.concatenate(
        [np.asarray(leaf, np.float32).reshape(5, -1) for leaf in jax.tree.leaves(tree)], axis=1
    )
    pairs = [np.mean((flat[i] - flat[j]) ** 2) for i in range(5) for j in range(5) if i != j]
    found = simulated(lambda key, tree: drift(tree, "data"))(KEY, tree)
    np.testing.assert_allclose(found, np.mean(pairs), rtol=1e-5)
    same = simulated(lambda key, x: drift(x, "data"))(KEY, jnp.full((3, 50), 0.1) * 3)
    assert (same == 0).all()


# Errors


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"axis_name": ("a", "b")}, ValueError, "axis_name=.* is not one axis"),
        ({"channel": 0.1}, TypeError, "channel=0.1.*LossyChannel"),
        ({"estimator": "mean"}, ValueError, "estimator='mean'"),
        ({"method": "powersgd"}, ValueError, "in dynamiq_research.LossyCollectives"),
        ({"channel": LossyChannel(rate=1.0), "estimator": "inverse"}, ValueError, "rates below 1"),
    ],
)
def test_collectives_that_are_not_possible(fields, error, message):
    with pytest.raises(error, match=message):
        lossy(**fields)


def test_trees_that_cannot_be_sent():
    of = lossy()
    with pytest.raises(ValueError, match=r"tree\['n'\] has dtype int32"):
        simulated(lambda key, tree: of.scatter_mean(tree, key=key))(
            KEY, {"n": jnp.ones((2, 3), int)}
        )
    with pytest.raises(
        ValueError, match=r"parts=.*float32\[4\].* are not the parts of this tree.*float32\[2\]"
    ):
        simulated(lambda key, x: of.broadcast(x, x, key=key))(KEY, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"key differs between the workers|several keys"):
        jax.vmap(
            lambda key, x: of.broadcast(of.own_parts(x), x, key=key),
            axis_name="data",
            in_axes=(None, 0),
        )(keys(2), jnp.ones((2, 4)))


def test_trees_without_numbers():
    def local(key, tree):
        of = lossy()
        sent = of.broadcast(of.own_parts(tree), tree, key=key)
        return of.scatter_mean(tree, key=key), sent, of.broadcast({}, {}, key=key)

    mean, sent, nothing = simulated(local)(KEY, {"w": jnp.zeros((4, 0))})
    assert mean["w"].shape == sent["w"].shape == (4, 0) and nothing == {}


def test_axes_that_the_compiler_manages_are_refused():
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    of = lossy()
    mapped = jax.shard_map(
        lambda x: of.own_parts(x),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    with pytest.raises(ValueError, match=r"'model'.*manual"):
        jax.jit(mapped)(jnp.ones((4, 8)))


def test_a_method_with_a_codec_of_its_own_is_named():
    class Other(dq.methods.ChunkCodec):
        compress = hop = accumulate = decompress = rounded = None

    with pytest.raises(ValueError, match=r"method=PowerSGD.*DynamiQ.*packet_loss.Terms"):
        terms_of(PowerSGD(), Other())


def test_a_codec_that_cannot_decode_one_message_is_named():
    with pytest.raises(ValueError, match=r"method=BF16.*cannot be decoded in parts.*Terms"):
        terms_of(dq.methods.BF16(), object())


def test_expected_drift_checks_its_arguments():
    with pytest.raises(ValueError, match="rate=1"):
        expected_drift(1.0, 4)
    with pytest.raises(ValueError, match="num_workers=1"):
        expected_drift(0.1, 1)
