"""Faults of packet loss: the channel, the bytes of coordinates, and both exchanges."""

from tests.faults import Fault

_CHANNEL = "dynamiq_jax/training/_packet_loss/channel.py"
_COLLECTIVES = "dynamiq_jax/training/_packet_loss/collectives.py"

FAULTS = (
    Fault(
        "all senders lose the same packets",
        _CHANNEL,
        "jax.random.fold_in(of_receiver, sender)",
        "jax.random.fold_in(of_receiver, 0)",
        ("tests/test_packet_loss.py::test_packets_are_lost_at_the_rate_and_independently",),
    ),
    Fault(
        "all receivers miss the same packets",
        _CHANNEL,
        "jax.random.fold_in(key, receiver)",
        "jax.random.fold_in(key, 0)",
        ("tests/test_packet_loss.py::test_every_pair_of_workers_loses_other_packets",),
    ),
    Fault(
        "bursts are one packet too long",
        _CHANNEL,
        "after_loss = np.full_like(rate, 1 - 1 / self.burst)",
        "after_loss = np.full_like(rate, 1 - 1 / (self.burst + 1))",
        ("tests/test_packet_loss.py::test_bursts_have_their_mean_length_at_the_same_rate",),
    ),
    Fault(
        "a message never starts in a burst",
        _CHANNEL,
        "first < link.lost",
        "first < 0 * link.lost",
        ("tests/test_packet_loss.py::test_bursts_have_their_mean_length_at_the_same_rate",),
    ),
    Fault(
        "rates are those of the way back",
        _CHANNEL,
        "jnp.asarray(table, jnp.float32)[:, receiver]",
        "jnp.asarray(table, jnp.float32)[receiver]",
        ("tests/test_packet_loss.py::test_links_have_rates_of_their_own",),
    ),
    Fault(
        "packets that two spans share count twice",
        _CHANNEL,
        "new = after - jnp.maximum(first, reached)",
        "new = after - first",
        ("tests/test_packet_loss.py::test_the_chance_of_a_group_is_how_often_it_is_intact",),
    ),
    Fault(
        "packets behind a gap follow at once",
        _CHANNEL,
        "memory ** (skipped + 1).astype(jnp.float32)",
        "memory",
        ("tests/test_packet_loss.py::test_the_chance_of_a_group_is_how_often_it_is_intact",),
    ),
    Fault(
        "the last packet of a span does not count",
        _CHANNEL,
        "after = -(-spans.stops // np.int32(self.packet_bytes))",
        "after = spans.stops // np.int32(self.packet_bytes)",
        ("tests/test_packet_loss.py::test_a_group_is_intact_if_all_packets_of_its_bytes_arrived",),
    ),
    Fault(
        "rows of DynamiQ do not depend on their super-scale",
        "pallas_kernels/codec/layout.py",
        "            jnp.full_like(place, 2),",
        "            jnp.full_like(place, 0),",
        (
            "tests/test_packet_loss.py::test_a_group_depends_on_the_bytes_of_its_spans_and_on_no_others",
        ),
    ),
    Fault(
        "spans of DynamiQ are in the order of places",
        "dynamiq_jax/methods/_dynamiq_codec.py",
        "starts, stops = (restore_rows(of_places, order) for of_places in ends)",
        "starts, stops = ends",
        (
            "tests/test_packet_loss.py::test_a_group_depends_on_the_bytes_of_its_spans_and_on_no_others",
        ),
    ),
    Fault(
        "the arrived others are divided by the number of all",
        _COLLECTIVES,
        "jnp.broadcast_to(others / jnp.maximum(arrived, 1), is_here.shape)",
        "jnp.ones(is_here.shape, jnp.float32)",
        ("tests/test_packet_loss.py::test_the_mean_estimate_is_the_mean_gradient",),
    ),
    Fault(
        "an own gradient that is alone is divided by all workers",
        _COLLECTIVES,
        "of_own = jnp.where(arrived > 0, one, others + 1)",
        "of_own = one",
        ("tests/test_packet_loss.py::test_if_all_is_lost_the_own_gradient_is_left",),
    ),
    Fault(
        "lost values are multiplied by zero",
        _COLLECTIVES,
        "jnp.where(take_chunk(is_here, index)[:, None], weighted, np.float32(0))",
        "take_chunk(is_here, index)[:, None].astype(jnp.float32) * weighted",
        ("tests/test_packet_loss.py::test_if_all_is_lost_the_own_gradient_is_left",),
        equivalent="XLA makes a selection of a product with a flag",
    ),
    Fault(
        "losses are those of another sender",
        _COLLECTIVES,
        "senders = (axis.index + 1 + jnp.arange(others)) % axis.size",
        "senders = (axis.index + jnp.arange(others)) % axis.size",
        (
            "tests/test_packet_loss.py::test_what_is_not_finite_surfaces_where_it_arrives_and_only_there",
        ),
    ),
    Fault(
        "arrived values are divided by the rate of arrival of a packet",
        _COLLECTIVES,
        "return one, 1 / chances",
        "return one, 1 / jnp.max(chances, axis=1, keepdims=True) + 0 * chances",
        ("tests/test_packet_loss.py::test_the_inverse_estimate_of_rows_in_several_packets",),
    ),
    Fault(
        "signs do not depend on the weight of their message",
        "dynamiq_jax/methods/_marsit.py",
        "jnp.concatenate([signs.stops, weight + _WEIGHT_BYTES], axis=1)",
        "jnp.concatenate([signs.stops, weight], axis=1)",
        (
            "tests/test_packet_loss.py::test_a_group_depends_on_the_bytes_of_its_spans_and_on_no_others",
        ),
    ),
    Fault(
        "terms of sums are not decoded",
        "dynamiq_jax/methods/_entropy_coded.py",
        "return self.summed.values_of_terms(terms, chunk)",
        "return terms",
        ("tests/test_packet_loss.py::test_values_of_all_terms_are_those_of_the_sum",),
    ),
    Fault(
        "lost parameters become zero",
        _COLLECTIVES,
        "jnp.where(is_new, new, _rows(leaf, axis.size))",
        "jnp.where(is_new, new, jnp.zeros_like(new))",
        ("tests/test_packet_loss.py::test_parameters_drift_by_the_law_and_no_further",),
    ),
)
