"""Rules of a round: quorums, copies, clipped norms, signatures, and residuals."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dynamiq_jax.islands import Islands, Sparse, encode
from dynamiq_jax.islands._records import Sent, opened, sealed
from dynamiq_jax.islands._rounds import file_of
from dynamiq_jax.islands._state import hash_of_state
from dynamiq_jax.islands.merging import clipped
from tests.support.gradients import heavy_tailed
from tests.support.islands import (
    PARAMS,
    PLAIN,
    Memory,
    ended,
    exchanged,
    joined,
    moved,
    near,
    same,
    together,
)


def mean_of(*trees):
    return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trees)


# ---------------------------------------------------------------------------------------- quorums


def test_a_quorum_and_a_grace_decide_without_the_last():
    islands, states = joined(Memory(), at_least=2, grace=0.1, deadline=60.0, **PLAIN)
    start = time.monotonic()
    after = exchanged(islands[:2], states[:2], (1, 2))
    assert 0.1 <= time.monotonic() - start < 20
    assert same(after[0][:2], after[1][:2])
    assert near(after[0].reference, mean_of(moved(PARAMS, 1), moved(PARAMS, 2)))
    # What comes later counts in the next round.
    late = islands[2].exchange(moved(PARAMS, 3), states[2])
    assert same(late[:2], after[0][:2]) and near(late.residual, _change(3))


def _change(seed):
    return jax.tree.map(np.subtract, PARAMS, moved(PARAMS, seed))


def test_all_that_came_in_the_grace_count():
    islands, states = joined(Memory(), at_least=2, grace=30.0, deadline=60.0, **PLAIN)

    def last():
        time.sleep(0.3)
        return islands[2].exchange(moved(PARAMS, 3), states[2])

    _, after = together([lambda: exchanged(islands[:2], states[:2], (1, 2)), last])
    assert near(after.reference, mean_of(*(moved(PARAMS, seed) for seed in (1, 2, 3))))


def test_without_a_quorum_nothing_is_decided_and_an_island_says_so_seldom(caplog):
    """Also if it waits for no island, so that each look is past the deadline."""
    islands, states = joined(Memory(), "ab", at_least=2, deadline=0, count=1, **PLAIN)

    def last():
        time.sleep(0.5)
        return islands[1].exchange(moved(PARAMS, 2), states[1])

    _, after = together([lambda: exchanged(islands[:1], states[:1], [1]), last])
    assert near(after.reference, mean_of(moved(PARAMS, 1), moved(PARAMS, 2)))
    warnings = [text for text in caplog.messages if "1 of 2 changes came" in text]
    assert 2 <= len(warnings) <= 4  # of some hundred looks
    assert warnings[0].startswith("round 0: 1 of 2 changes came in 0 s.")


# ----------------------------------------------------------------------------------------- norms


def test_factors_take_norms_above_the_median_to_the_median():
    assert clipped({}) == {}
    assert clipped({"a": 1.0}) == {}
    assert clipped({"a": 1.0, "b": 3.0}) == {"b": 2 / 3}
    assert clipped({"a": 1.0, "b": 2.0, "c": 8.0}) == {"c": 0.25}


def test_a_large_change_is_scaled_to_the_median():
    islands, states = joined(Memory(), clip=True, **PLAIN)
    far = jax.tree.map(lambda a, b: a + 50 * (b - a), PARAMS, moved(PARAMS, 1))
    params = [moved(PARAMS, 1), moved(PARAMS, 2), far]
    after = ended(islands, states, params)
    assert all(same(state[:2], after[0][:2]) for state in after)
    changes = [jax.tree.map(lambda a, b: np.subtract(b, a, dtype=float), PARAMS, p) for p in params]
    norms = [np.linalg.norm([*map(np.linalg.norm, jax.tree.leaves(c))]) for c in changes]
    factors = [min(1, np.median(norms) / norm) for norm in norms]
    pairs = zip(factors, changes, strict=True)
    scaled = [jax.tree.map(lambda leaf, f=f: f * leaf, change) for f, change in pairs]
    wanted = jax.tree.map(np.add, PARAMS, mean_of(*scaled))
    assert min(factors) < 0.03 and near(after[0].reference, wanted)


# ---------------------------------------------------------------------------------------- copies


def test_a_copy_is_left_out_by_name(caplog):
    islands, states = joined(Memory(), **PLAIN)
    after = exchanged(islands, states, (1, 2, 2))
    assert near(after[0].reference, mean_of(moved(PARAMS, 1), moved(PARAMS, 2)))
    assert all(text.startswith("round 0: the change of 'c' is left") for text in caplog.messages)
    assert "bytes of the change of 'b'" in caplog.messages[0]


@pytest.mark.parametrize(("overlap", "counts"), ((0.5, False), (1.0, True)))
def test_a_sparse_copy_with_other_values_is_left_out(overlap, counts, caplog):
    sparse = {"method": Sparse(keep=8, chunk=256), "feedback": True, "outer": optax.sgd(1.0)}
    islands, states = joined(Memory(), "ab", overlap=overlap, **sparse)
    own = moved(PARAMS, 1)
    other = jax.tree.map(lambda a, b: a + 2 * (b - a), PARAMS, own)
    after = ended(islands, states, (own, other))
    assert same(after[0][:2], after[1][:2])
    told = any("of its coordinates from that of 'a'" in text for text in caplog.messages)
    assert told != counts


# ------------------------------------------------------------------------------------ signatures


def forged(number: int, reference: str, secret: bytes | None) -> tuple[str, bytes]:
    """The file of a change of `c` by somebody who has another secret, or none."""
    file = file_of("change", number, reference, "c")
    message = encode(moved(PARAMS, 9), method="exact", key=jax.random.key(0))
    return file, sealed(file, Sent(1.0, "c", message).to_bytes(), secret)


@pytest.mark.parametrize(
    ("secret", "words"), ((None, "it has no signature"), (b"another one", "its signature is wrong"))
)
def test_a_change_without_the_signature_is_left_out_by_name(secret, words, caplog):
    store = Memory()
    islands, states = joined(store, "ab", secret=b"of the run", **PLAIN)
    file, data = forged(0, hash_of_state(states[0]), secret)
    store.files[file] = data
    after = exchanged(islands, states, (1, 2))
    assert near(after[0].reference, mean_of(moved(PARAMS, 1), moved(PARAMS, 2)))
    assert caplog.messages
    for text in caplog.messages:
        assert "the change of 'c' is left out" in text and words in text
    assert {data[:4] for path, data in store.files.items() if data and path != file} == {b"DQIH"}


def test_a_signature_is_of_one_file():
    """The change of one round is none of the next."""
    file, data = forged(0, "0" * 16, b"of the run")
    assert opened(file, data, b"of the run")
    with pytest.raises(ValueError, match="its signature is wrong"):
        opened(file.replace("00000000", "00000001"), data, b"of the run")


def test_a_run_with_signatures_is_joined_with_the_secret_alone():
    store = Memory()
    joined(store, "a", secret=b"of the run", **PLAIN)
    stranger = Islands(transport=store, name="c", **PLAIN)
    with pytest.raises(ValueError, match=r"it has a signature\. Give the secret of the other"):
        stranger.join(PARAMS)


# ------------------------------------------------------------------------------------- residuals


SPARSE = Sparse(keep=16, chunk=256, gain=1.0)


@pytest.mark.parametrize(("method", "decay"), ((SPARSE, 1.0), (SPARSE, 0.5), ("blockint:2", 1.0)))
def test_what_messages_leave_out_comes_later(method, decay):
    fields = {**PLAIN, "method": method, "feedback": True, "decay": decay}
    (island,), (state,) = joined(Memory(), "a", **fields)
    own = moved(PARAMS, 1)
    after = island.exchange(own, state)
    sent = jax.tree.map(np.subtract, state.reference, after.reference)
    change = jax.tree.map(np.subtract, PARAMS, own)
    assert near(after.residual, jax.tree.map(np.subtract, change, sent))
    assert np.any(after.residual["w"])
    count = sum(np.count_nonzero(leaf) for leaf in jax.tree.leaves(sent))
    assert count > 0 and (method != SPARSE or count <= 16 * 6)
    # A round without a move sends the residual, decayed.
    last = island.exchange(after.reference, after)
    both = jax.tree.map(np.subtract, after.reference, last.reference)
    left = jax.tree.map(lambda r, s: decay * r - s, after.residual, both)
    assert near(last.residual, left)


def test_residuals_of_narrow_leaves_are_float32():
    params = {"w": jnp.asarray(heavy_tailed(0, (64, 64)), jnp.bfloat16)}
    island = Islands(transport=Memory(), name="a", method=Sparse(), feedback=True)
    state = island.join(params)
    own = {"w": params["w"] + jnp.asarray(heavy_tailed(1, (64, 64)), jnp.bfloat16)}
    after = island.exchange(own, state)
    assert after.reference["w"].dtype == jnp.bfloat16
    assert after.residual["w"].dtype == jnp.float32 and np.any(after.residual["w"])
    newcomer = Islands(transport=island.transport, name="b", method=Sparse(), feedback=True)
    assert same(newcomer.join(params)[:2], after[:2])
