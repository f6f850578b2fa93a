"""Sums that are sent for nothing, found in the flow of a traced step, and no others."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax._inspection.findings import Evidence, findings
from dynamiq_jax._inspection.flow import flow_of
from dynamiq_jax._plan.recording import marked, recording
from tests.support.workers import STOCHASTIC

KINDS = {"sent and thrown away": "thrown", "sent repeatedly": "repeated"}
TURNS = 4
PARAMS = {"w": jnp.ones((64, 96)), "v": jnp.ones((96, 64))}
FROZEN = {"w": jnp.ones((64, 96)), "frozen": jnp.ones((96, 64))}
ROWS = jnp.ones((TURNS * 8, 64))
KEY = jax.random.key(0)
mean = functools.partial(dq.pmean, axis_name="data", key=KEY, method=STOCHASTIC)


def loss(params, rows):
    return jnp.mean(jnp.tanh(rows @ params["w"] @ params["v"]) ** 2)


def frozen_loss(params, rows):
    return jnp.mean((rows @ params["w"] @ lax.stop_gradient(params["frozen"])) ** 2)


def sgd(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def batches(rows):
    return rows.reshape(TURNS, -1, rows.shape[1])


def halves(rows):
    return jnp.split(rows, 2)


def total(gradient_of, params, batches, first=None):
    """Add up gradients of batches in a loop that begins with zeros, or with the first."""

    def turn(total, rows):
        return jax.tree.map(jnp.add, total, gradient_of(params, rows)), None

    start = jax.tree.map(jnp.zeros_like, params) if first is None else first
    return lax.scan(turn, start, batches)[0]


def mean_gradient(params, rows):
    return mean(jax.grad(loss)(params, rows))


def means_of_halves(params, rows):
    return [mean_gradient(params, each) for each in halves(rows)]


# ------------------------------------------------------------------------ steps with a mistake


def zeros_by_hand(params, rows):
    return sgd(params, mean(jax.grad(frozen_loss)(params, rows)))


def zeros_added_up_in_a_loop(params, rows):
    return sgd(params, mean(total(jax.grad(frozen_loss), params, batches(rows))))


def by_optax(*transforms):
    def step(params, rows):
        reduce = dq.all_reduce_gradients("data", method=STOCHASTIC)
        optimizer = optax.chain(*(reduce if each is None else each for each in transforms))
        grads = jax.grad(loss)(params, rows)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return step


REDUCE_TRAINED = optax.masked(
    dq.all_reduce_gradients("data", method=STOCHASTIC), {"w": True, "v": False}
)
FREEZE = optax.masked(optax.set_to_zero(), {"w": False, "v": True})


def added_in_a_loop(params, rows):
    return sgd(params, total(mean_gradient, params, batches(rows)))


def running_mean(params, rows):
    def turn(i, total):
        own = mean_gradient(params, batches(rows)[i])
        return jax.tree.map(lambda m, g: m + (g - m) / (i + 1), total, own)

    return sgd(params, lax.fori_loop(0, TURNS, turn, jax.tree.map(jnp.zeros_like, params)))


def unrolled(params, rows):
    means = (mean_gradient(params, each) for each in batches(rows))
    added = functools.reduce(functools.partial(jax.tree.map, jnp.add), means)
    return sgd(params, jax.tree.map(lambda leaf: leaf / (abs(leaf) + 1e-8), added))


def of_halves(combine):
    return lambda params, rows: sgd(params, jax.tree.map(combine, *means_of_halves(params, rows)))


def begun_with_a_sum(params, rows):
    """The first micro-batch is in front of the loop over the others."""
    first, *others = batches(rows)
    begun = mean_gradient(params, first)
    return sgd(params, total(mean_gradient, params, jnp.stack(others), begun))


# ----------------------------------------------------------------------- steps without a mistake


def plain(params, rows):
    return sgd(params, mean_gradient(params, rows))


def summed_once(params, rows):
    return sgd(params, mean(total(jax.grad(loss), params, batches(rows))))


def clipped_one_by_one(params, rows):
    """Each sum is clipped: the sum of what is clipped is no clipped sum."""
    clip = optax.clip_by_global_norm(1.0)
    both = means_of_halves(params, rows)
    first, second = (clip.update(each, clip.init(params))[0] for each in both)
    return sgd(params, jax.tree.map(jnp.add, first, second))


def projected(params, rows):
    """Gradients of two tasks, of which one loses its part along the other."""
    first, second = means_of_halves(params, rows)
    share = sum(map(jnp.vdot, jax.tree.leaves(first), jax.tree.leaves(second)))
    return sgd(params, jax.tree.map(lambda a, b: a + (b - share * a), first, second))


def steps_in_a_loop(params, rows):
    optimizer = optax.sgd(0.1, momentum=0.9)

    def turn(carry, rows):
        params, state = carry
        updates, state = optimizer.update(mean_gradient(params, rows), state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(turn, (params, optimizer.init(params)), batches(rows))[0][0]


def two_steps_unrolled(params, rows):
    for each in halves(rows):
        params = plain(params, each)
    return params


def two_optimizers(params, rows):
    """As a generator and its critic, of equal shapes."""
    critic = jax.tree.map(lambda leaf: 2 * leaf, params)
    joint = lambda params, critic: loss(params, rows) - loss(critic, rows)  # noqa: E731
    first, second = jax.grad(joint, (0, 1))(params, critic)
    return sgd(params, mean(first)), sgd(critic, mean(second))


def one_sum_decides(params, rows):
    """By a `cond` whose branches do not take it."""
    first, second = (mean(jax.grad(loss)(params, each)["w"]) for each in halves(rows))
    rate = lax.cond(first[0, 0] > 0, lambda: 1.0, lambda: 0.1)
    return {"w": params["w"] - rate * (first + second)}


def bounded_total(params, rows):
    """A total that is no sum after its first turn."""

    def turn(total, rows):
        own = mean_gradient(params, rows)
        return jax.tree.map(lambda a, b: jnp.tanh(a + b), total, own), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return sgd(params, lax.scan(turn, zeros, batches(rows))[0])


def each_sum_is_a_result(params, rows):
    first, second = means_of_halves(params, rows)
    return sgd(params, jax.tree.map(jnp.add, first, second)), first


def zeros_of_a_few_numbers(params, rows):
    tree = {**params, "bias": 0 * params["w"].reshape(-1)[:512]}
    return sgd(params, {k: v for k, v in mean(tree).items() if k in params})


def no_zeros_after_all(params, rows):
    """A total that begins with zeros, in a loop or beside it, and in one branch of two."""
    grads = jax.grad(loss)(params, rows)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    gated = lax.cond(jnp.sum(rows) > 0, lambda: grads, lambda: zeros)
    return sgd(params, mean(jax.tree.map(jnp.add, gated, zeros)))


STEPS = {
    "zeros by hand": (zeros_by_hand, FROZEN, "thrown"),
    "zeros added up in a loop": (zeros_added_up_in_a_loop, FROZEN, "thrown"),
    "zeros in front of the sum": (by_optax(FREEZE, None), PARAMS, "thrown"),
    "zeros behind the sum": (by_optax(None, FREEZE), PARAMS, "thrown"),
    "added in a loop": (added_in_a_loop, PARAMS, "repeated"),
    "running mean": (running_mean, PARAMS, "repeated"),
    "unrolled": (unrolled, PARAMS, "repeated"),
    "losses one by one": (of_halves(lambda a, b: (a + 0.5 * b) / 2), PARAMS, "repeated"),
    "divided one by one": (of_halves(lambda a, b: a / 2 + b / 2), PARAMS, "repeated"),
    "begun with a sum": (begun_with_a_sum, PARAMS, "repeated"),
    "frozen and masked": (by_optax(REDUCE_TRAINED, FREEZE), PARAMS, None),
}
SOUND = (
    *(plain, summed_once, clipped_one_by_one, projected, steps_in_a_loop, two_steps_unrolled),
    *(two_optimizers, one_sum_decides, bounded_total, each_sum_is_a_result),
    *(zeros_of_a_few_numbers, no_zeros_after_all),
)
STEPS |= {step.__name__: (step, PARAMS, None) for step in SOUND}


def mapped(mesh, step, check_vma):
    def local(params, rows):
        names = ("data",) if check_vma else ()
        return step(lax.pcast(params, names, to="varying"), rows)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data") if check_vma else P(),
        check_vma=check_vma,
    )


def texts_of(mesh, step, params, *, check_vma=True) -> list[tuple[str, str]]:
    """The kinds and texts of findings about the flow of a step."""
    with recording() as records:
        traced = jax.jit(mapped(mesh, step, check_vma)).trace(params, jnp.concatenate([ROWS] * 4))
        known = Evidence(records=tuple(records), flow=flow_of(traced.jaxpr))
    return [(KINDS[each.kind], each.text) for each in findings(known) if each.kind in KINDS]


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("name", STEPS)
def test_a_sum_for_nothing_is_found_and_no_other(data_mesh, name, check_vma):
    step, params, expected = STEPS[name]
    found = texts_of(data_mesh(4), step, params, check_vma=check_vma)
    assert [kind for kind, _ in found] == [expected][: expected is not None]


COUNTS = dict.fromkeys(("added in a loop", "running mean", "unrolled", "begun with a sum"), TURNS)


@pytest.mark.parametrize("name", [*COUNTS, "losses one by one"])
def test_the_bytes_are_those_of_all_sums_and_of_one(data_mesh, name):
    step, params, _ = STEPS[name]
    [(_, text)] = texts_of(data_mesh(4), step, params)
    once = dq.wire_report(params, 4, method=STOCHASTIC).bytes_per_worker
    count = COUNTS.get(name, 2)
    assert f"Leaves ['v'], ['w'] over 'data' are sent {count} times" in text
    assert f"{format_bytes(count * once)} in a step, of which {format_bytes(once)} " in text


@pytest.mark.parametrize("frozen_first", (True, False))
def test_the_bytes_of_what_is_thrown_away_are_those_of_its_leaves(data_mesh, frozen_first):
    """Also where leaves are in several buckets."""
    step = by_optax(*((FREEZE, None) if frozen_first else (None, FREEZE)))
    [(_, text)] = texts_of(data_mesh(4), step, PARAMS)
    total = dq.wire_report(PARAMS, 4, method=STOCHASTIC).bytes_per_worker
    assert ("constant zeros" in text) == frozen_first
    assert "Leaf ['v'] over 'data' is " in text
    assert f"{format_bytes(total / 2)} of {format_bytes(total)} in a step" in text


def test_a_mark_is_a_name_of_this_library_alone():
    assert marked("dynamiq_jax.sum.12.3") == ("sum", 12, 3)
    for name in ("sum.12.3", "dynamiq_jax.sum.12", "activations", "dynamiq_jax.sum.12.3.4"):
        assert marked(name) is None


def test_a_call_that_is_not_recorded_has_no_names(data_mesh):
    step = mapped(data_mesh(4), plain, True)
    traced = jax.jit(step).trace(PARAMS, jnp.concatenate([ROWS] * 4))
    assert not flow_of(traced.jaxpr).sent
    assert "name=dynamiq_jax" not in str(traced.jaxpr)
