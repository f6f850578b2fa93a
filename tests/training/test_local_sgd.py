"""Local SGD with a compressed outer step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from dynamiq_jax.training import LocalSGD
from dynamiq_jax.training._fragments import Fragments
from dynamiq_jax.training._local_sgd import Due
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC, Decaying

WORKERS = 4
EVERY_LEAF = dq.Compression(exact_below=1)
SHAPES = {"b": (33,), "u": (48, 32), "v": (16, 96), "w": (32, 48)}


def start(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}


def moves(steps: int) -> list[dict[str, np.ndarray]]:
    """What the local steps of all workers add to their parameters."""
    rng = np.random.default_rng(1)
    return [
        {n: rng.normal(size=(WORKERS, *s)).astype(np.float32) for n, s in SHAPES.items()}
        for _ in range(steps)
    ]


class Run:
    """Local steps of four workers on a mesh, which add given moves."""

    def __init__(self, mesh, *, static: bool = False, **fields):
        self.local_sgd = LocalSGD(axis_name="data", **fields)
        self.static = static
        specs = self.local_sgd.state_specs
        init = jax.shard_map(self.local_sgd.init, mesh=mesh, in_specs=P(), out_specs=specs)
        self.init = jax.jit(init)

        def local(stacked, state, move, due):
            mine = jax.tree.map(lambda leaf, change: leaf[0] + change[0], stacked, move)
            mine, state = self.local_sgd.update(mine, state, due=due)
            return jax.tree.map(lambda leaf: leaf[None], mine), state

        @functools.partial(jax.jit, static_argnames="due")
        def step(stacked, state, move, due=None):
            mapped = jax.shard_map(
                functools.partial(local, due=due),
                mesh=mesh,
                in_specs=(P("data"), specs, P("data")),
                out_specs=(P("data"), specs),
            )
            return mapped(stacked, state, move)

        self.step = step

    def begin(self):
        params = start()
        return jax.tree.map(lambda leaf: np.stack([leaf] * WORKERS), params), self.init(params)

    def take(self, carry, changes, first: int = 0):
        for number, change in enumerate(changes, first):
            due = {"due": self.local_sgd.due(number)} if self.static else {}
            carry = self.step(*carry, change, **due)
        return carry


def oracle(changes, *, every, fragments, delay, mixing, rate=0.7, momentum=0.9):
    """The papers' algorithms in NumPy, float64, leaf by leaf."""
    reference = {name: leaf.astype(np.float64) for name, leaf in start().items()}
    workers = {name: np.stack([leaf] * WORKERS) for name, leaf in reference.items()}
    velocity = {name: np.zeros(s) for name, s in SHAPES.items()}
    places = {n: np.arange(leaf.size).reshape(leaf.shape) for n, leaf in reference.items()}
    parts = LocalSGD(axis_name="data", fragments=fragments).split(places)
    parts = [  # places in each leaf, as masks
        {name: np.isin(places[name], leaf) for name, leaf in part.items() if leaf is not None}
        for part in parts
    ]
    pending: dict[int, list[Any]] = {}  # what to apply after so many steps
    for taken, change in enumerate(changes, 1):
        for name in SHAPES:
            workers[name] = workers[name] + change[name]
        for number, masks in enumerate(parts):
            offset = every * (number + 1) // fragments
            if taken >= offset and (taken - offset) % every == 0:
                pending.setdefault(taken + delay, []).extend(
                    (name, mask, (reference[name] - workers[name].mean(0))[mask])
                    for name, mask in masks.items()
                )
        for name, mask, outer_gradient in pending.pop(taken, []):
            speed = velocity[name][mask] = momentum * velocity[name][mask] + outer_gradient
            reference[name][mask] -= rate * (outer_gradient + momentum * speed)
            mixed = mixing * workers[name] + (1 - mixing) * reference[name]
            workers[name] = np.where(mask, mixed, workers[name])
    return reference, workers


def streaming_diloco(delay: int, alpha: float, steps: int) -> list[tuple[float, float]]:
    """Two scalars in the regression test of torchft's Streaming DiLoCo, after each local step.

    Gradients are 2, the inner rate is 1 and the outer one 2. Every three steps one of the two
    fragments takes its turn: its change is sent `delay` steps before it is applied.
    """
    weights, references, sent = [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]
    history = []
    for step in range(1, steps + 1):
        weights = [weight - 2.0 for weight in weights]
        turn = ((step + delay) // 3 - 1) % 2
        if (step + delay) % 3 == 0:
            sent[turn] = references[turn] - weights[turn]
        turn = (step // 3 - 1) % 2
        if step % 3 == 0:
            references[turn] -= 2 * sent[turn]
            weights[turn] = alpha * weights[turn] + (1 - alpha) * references[turn]
        history.append((weights[0], weights[1]))
    return history


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.5), (1, 0.5), (1, 0.0)])
def test_trajectories_are_those_of_streaming_diloco_in_torchft(delay, alpha):
    """Which counts a period from what it applies, and this class from what it sends: with a delay,
    the first period is as much shorter there.
    """
    fields = {"every": 6, "fragments": 2, "delay": delay, "mixing": alpha}
    local_sgd = LocalSGD(axis_name="data", outer=optax.sgd(2.0), method="exact", **fields)

    def run(params):
        def step(carry, _):
            params, state = local_sgd.update(jax.tree.map(lambda w: w - 2, carry[0]), carry[1])
            return (params, state), params

        state = local_sgd.init(params)
        carry = params, state._replace(step=state.step + delay)
        return jax.lax.scan(step, carry, None, 21)[1]  # seven turns

    params = {"layers.0": jnp.ones((1, 1)), "layers.1": jnp.ones((1, 1))}
    weights = jax.jit(simulated(run))(params).values()
    history = list(zip(*(leaf[0, :, 0, 0].tolist() for leaf in weights), strict=True))
    expected = streaming_diloco(delay, alpha, 21)
    assert history == expected
    assert len(set(expected)) > 15
    if (delay, alpha) == (0, 0.0):  # 1 - 6 = -5, moved by twice the 6 to -11
        assert expected[2] == (-11.0, -5.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fields",
    (
        {"every": 3, "fragments": 1, "delay": 0, "mixing": 0.0},
        {"every": 4, "fragments": 3, "delay": 0, "mixing": 0.0},
        {"every": 5, "fragments": 2, "delay": 3, "mixing": 0.5},
        {"every": 4, "fragments": 4, "delay": 2, "mixing": 0.25},
    ),
    ids=("diloco", "fragments", "delay", "both in one step"),
)
def test_it_is_the_algorithm_of_the_papers(fields, data_mesh):
    """With exact means; in one program for all steps, and in programs for each kind of step."""
    changes = moves(2 * fields["every"] + 2)
    expected = oracle(changes, **fields)
    ends = []
    for static in (False, True):
        run = Run(data_mesh(WORKERS), method="exact", static=static, **fields)
        stacked, state = run.take(run.begin(), changes)
        ends.append((state.reference, stacked))
        assert int(state.step) == len(changes)
        for found, wanted in zip((state.reference, stacked), expected, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=2e-5)
    # Compilers fuse products and sums of the two programs in other ways.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *ends)
    moved = [np.abs(expected[0][name] - start()[name]).max() for name in SHAPES]
    assert min(moved) > 0.1


def test_parameters_of_16_bits_are_mixed(data_mesh):
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=(64, 16)), jnp.bfloat16)
    move = jnp.asarray(rng.normal(size=(WORKERS, 64, 16)), jnp.bfloat16)
    run = Run(data_mesh(WORKERS), every=1, mixing=0.25, outer=optax.sgd(1.0), method="exact")
    stacked = jnp.stack([start] * WORKERS)
    after, state = run.step({"w": stacked}, run.init({"w": start}), {"w": move})
    local = (stacked + move).astype(jnp.float32)
    whole = state.reference["w"].astype(jnp.float32)
    assert after["w"].dtype == jnp.bfloat16
    mixed = 0.25 * local + 0.75 * whole[None]
    np.testing.assert_allclose(after["w"].astype(jnp.float32), mixed, rtol=0.01, atol=0.01)
    assert np.abs(whole - local.mean(0)).max() < 0.1


def test_local_steps_that_promote_parameters_are_an_error(data_mesh):
    run = Run(data_mesh(WORKERS), every=1, method="exact")
    state = run.init({"w": jnp.zeros((64, 16), jnp.bfloat16)})
    wide = {"w": jnp.zeros((WORKERS, 64, 16))}
    with pytest.raises(ValueError, match=r"params are not like.*float32\[64, 16\].*cast its"):
        run.step(wide, state, wide)


def test_due_says_what_a_step_does():
    local_sgd = LocalSGD(axis_name="data", every=6, fragments=2, delay=1)
    found = [local_sgd.due(step) for step in range(12)]
    assert [due.sent for due in found] == [None, None, 0, None, None, 1] * 2
    applied = [None, None, None, 0, None, None, 1, None, None, 0, None, None]
    assert [due.applied for due in found] == applied


def test_replicas_of_the_reference_are_bit_identical_and_rest_where_no_worker_moves(data_mesh):
    """Of a lossy method, whose error is seen. Zeros are sent as zeros."""
    run = Run(data_mesh(WORKERS), every=2, method="blockint:4")
    stacked, state = run.begin()
    still = jax.tree.map(np.zeros_like, stacked)
    stacked, state = run.take((stacked, state), [still] * 2)
    jax.tree.map(np.testing.assert_array_equal, state.reference, start())
    changes = moves(2)
    stacked, state = run.take((stacked, state), changes)
    for name, leaf in state.reference.items():
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == WORKERS
        assert {copy.tobytes() for copy in copies} == {copies[0].tobytes()}
        np.testing.assert_array_equal(stacked[name], np.stack([leaf] * WORKERS))
    expected, _ = oracle(changes, every=2, fragments=1, delay=0, mixing=0.0)
    w = expected["w"]
    error = np.sum((state.reference["w"] - w) ** 2) / np.sum((w - start()["w"]) ** 2)
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("fragments", (1, 3))
def test_only_steps_that_synchronize_send_and_they_send_what_is_reported(data_mesh, fragments):
    mesh = data_mesh(WORKERS)
    run = Run(mesh, every=6, fragments=fragments, method="bf16")
    reports = run.local_sgd.wire_report(start(), WORKERS)
    stacked, state = run.begin()
    sent = []
    for number in range(6):
        due = run.local_sgd.due(number)
        compiled = run.step.lower(stacked, state, moves(1)[0], due=due).compile()
        found = collectives(compiled.as_text())
        sent.append(sum(one.sent_bytes(WORKERS) for one in found))
        if due.sent is None:
            assert found == []
    assert [one for one in sent if one] == [report.bytes_per_worker for report in reports]
    whole = dq.wire_report(start(), WORKERS, method="bf16").bytes_per_worker
    # Each fragment pads its chunks.
    assert whole <= sum(sent) < whole + 100
    assert max(sent) < 1.2 * whole / fragments


def test_a_run_resumes_bit_identically_during_a_delay(data_mesh, tmp_path):
    """A mean change is on its way, and error feedback holds residuals."""
    run = Run(data_mesh(WORKERS), every=4, fragments=2, delay=2, mixing=0.5, method="ef+blockint:2")
    changes = moves(9)
    uninterrupted = run.take(run.begin(), changes)
    half = run.take(run.begin(), changes[:5])
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(half[1].pending))
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(half[1].method))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", half)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "half", half)
    resumed = run.take(restored, changes[5:], first=5)
    jax.tree.map(np.testing.assert_array_equal, resumed, uninterrupted)
    forgetful = half[1]._replace(method=run.begin()[1].method)
    other = run.take((half[0], forgetful), changes[5:], first=5)[1]
    assert np.any(other.reference["w"] != uninterrupted[1].reference["w"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", ({}, {"fragments": 2, "every": 2, "delay": 1}), ids=str)
def test_shards_of_a_model_travel_alone(data_mesh, fields):
    """Over data 2 x fsdp 4: the parameters of a run without shards, a quarter of its bytes."""
    fields = {"every": 1} | fields
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params = {"w": start()["w"], "v": start()["v"]}
    specs = {"w": P(None, "fsdp"), "v": P("fsdp")}
    moved = jax.tree.map(lambda leaf: np.stack([leaf, 3 * leaf]), params)

    def run(mesh, specs, method):
        how = dataclasses.replace(EVERY_LEAF, method=method, specs=specs)
        local_sgd = LocalSGD(axis_name="data", method=how, **fields)

        def local(params, moved):
            mine = jax.tree.map(lambda leaf: leaf[0], moved)
            state = local_sgd.init(params)
            for _ in range(3):
                mine, state = local_sgd.update(mine, state)
            return jax.tree.map(lambda leaf: leaf[None], mine), state

        out_specs = P("data"), local_sgd.state_specs
        axes = {"mesh": mesh, "axis_names": {"data"}}
        step = jax.shard_map(local, in_specs=(P(), P("data")), out_specs=out_specs, **axes)
        args = params, moved
        if specs is not None:
            of_moved = {name: P("data", *spec) for name, spec in specs.items()}
            shardings = jax.tree.map(functools.partial(NamedSharding, mesh), (specs, of_moved))
            args = jax.device_put(args, shardings)
        return local_sgd, jax.jit(step), args

    _, plain, args = run(data_mesh(2), None, "exact")
    _, sharded, sharded_args = run(mesh, specs, "exact")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, plain(*args), sharded(*sharded_args))
    local_sgd, step, args = run(mesh, specs, STOCHASTIC)
    sent = sent_by_axes(step.lower(*args).compile().as_text(), mesh)
    reports = local_sgd.wire_report(params, "data", mesh=mesh)
    period = sum(report.bytes_per_worker for report in reports)
    assert sent[("data",)] == 3 * period  # three updates, each a choice between all fragments
    how = dataclasses.replace(EVERY_LEAF, method=STOCHASTIC)
    whole = dq.wire_report(params, 2, method=how).bytes_per_worker
    assert period == pytest.approx(whole / 4, rel=0.01)
    with pytest.raises(ValueError, match="mesh=None, but specs is given"):
        local_sgd.wire_report(params, 2)


def test_parts_of_another_kind_are_refused(data_mesh):
    local_sgd = LocalSGD(axis_name="data", every=4, fragments=2)
    state = jax.shard_map(
        local_sgd.init, mesh=data_mesh(2), in_specs=P(), out_specs=local_sgd.state_specs
    )(start())
    with pytest.raises(TypeError, match="state is a dict, not a LocalSGDState"):
        local_sgd.update(state, start())
    for due in (Due(5, None), Due(-1, None), (0, None), True):
        with pytest.raises(ValueError, match=r"due=.* is none of the 2 fragments"):
            local_sgd.update(start(), state, due=due)
    for step in (-1, 2.5):
        with pytest.raises(ValueError, match=f"step={step}"):
            local_sgd.due(step)


def simulated(function, workers=2):
    """Of parameters that all workers share."""
    return jax.vmap(function, in_axes=None, axis_name="data", axis_size=workers)


def trace_update(one: LocalSGD, other: LocalSGD, **due) -> None:
    """Trace a step of one description with the state of another."""
    step = simulated(lambda params: other.update(params, one.init(params), **due))
    jax.eval_shape(step, start())


MOMENTUM = optax.sgd(0.7, momentum=0.9)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    (
        ({"delay": 1}, {}, "state.pending is of 'every_4_delay_1', but .* 'no delay'.* never"),
        ({}, {"delay": 1}, "state.pending is of 'no delay'"),
        ({"delay": 1}, {"delay": 2}, "'every_4_delay_1', but .* 'every_4_delay_2'"),
        ({"delay": 1}, {"delay": 1, "every": 5}, "'every_5_delay_1'"),
        ({"fragments": 2}, {"fragments": 3}, "state.outer has 'fragment_0-.*init"),
        ({}, {"method": "ef+bf16"}, "state.method has no state, but .* need 'ErrorFeedback"),
        ({"method": "ef+bf16"}, {}, "state.method has 'ErrorFeedback-.* need no state"),
        ({"method": "ef+bf16"}, {"method": Decaying()}, "the kinds differ"),
        (
            {"method": {"[uv]": "ef+bf16", "": "ef+mxfp8"}},
            {"method": {"[uw]": "ef+bf16", "": "ef+mxfp8"}},
            "the leaves differ",
        ),
        ({"outer": MOMENTUM}, {"outer": optax.adam(0.7)}, "Give the outer optimizer of init"),
    ),
)
def test_a_state_of_other_settings_is_refused(before, after, words):
    """Every array of it may have the shape that is needed."""
    fields = {"every": 4, "method": "bf16"}
    one, other = (LocalSGD(axis_name="data", **fields | own) for own in (before, after))
    for due in (None, Due(None, None)):  # also in a step that sends nothing
        with pytest.raises(ValueError, match=words):
            trace_update(one, other, due=due)
    trace_update(one, one)


def test_a_state_of_other_parameters_is_refused():
    local_sgd, params = LocalSGD(axis_name="data", method="bf16"), start()
    renamed = {"x" if name == "w" else name: leaf for name, leaf in params.items()}
    step = simulated(lambda params: local_sgd.update(renamed, local_sgd.init(params)))
    with pytest.raises(ValueError, match=r"'fragment_0-b_u_v_w-.*the leaves differ"):
        jax.eval_shape(step, params)


@pytest.mark.parametrize(
    "fields",
    (
        {"every": 7, "mixing": 0.5, "seed": 3, "outer": optax.sgd(0.1, momentum=0.5)},
        {"method": dq.Compression("ef+mxfp8", "butterfly")},
    ),
    ids=min,
)
def test_settings_that_may_change_in_a_run(fields):
    same = {"every": 4, "method": "ef+bf16", "outer": MOMENTUM}
    one, other = (LocalSGD(axis_name="data", **{**same, **each}) for each in ({}, fields))
    trace_update(one, other)


def test_the_outer_optimizer_decays_the_reference(data_mesh):
    """It is given the weights that all workers share, not those of one of them."""
    outer = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5))
    run = Run(data_mesh(WORKERS), every=1, method="exact", outer=outer)
    (change,) = moves(1)
    _, state = run.take(run.begin(), [change])
    for name, before in start().items():
        expected = before - 0.5 * (0.1 * before - change[name].mean(0))
        np.testing.assert_allclose(state.reference[name], expected, rtol=1e-5, atol=1e-5)


def test_every_synchronization_has_noise_of_its_own():
    """The same changes, which an outer optimizer keeps that moves nothing."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda change, state, params: (jax.tree.map(jnp.zeros_like, change), change),
    )
    local_sgd = LocalSGD(axis_name="data", every=1, method=STOCHASTIC, outer=keep)

    def run(change):
        params = {"w": jnp.zeros(2048)}
        state, sent = local_sgd.init(params), []
        for _ in range(2):
            params, state = local_sgd.update(jax.tree.map(jnp.add, params, change), state)
            (mean,) = state.outer.values()
            sent.append(mean["w"])
        return sent

    change = {"w": np.random.default_rng(0).normal(size=(2, 2048)).astype(np.float32)}
    first, second = jax.jit(jax.vmap(run, axis_name="data"))(change)
    assert 0.2 < np.mean(np.asarray(first[0] != second[0])) < 1
    for mean in (first[0], second[0]):
        np.testing.assert_allclose(mean, -change["w"].mean(0), rtol=0.05, atol=0.02)


def test_nan_of_one_worker_surfaces_for_all(data_mesh):
    run = Run(data_mesh(WORKERS), every=1, method="bf16")
    (change,) = moves(1)
    change["w"][2, 5, 7] = np.nan
    stacked, state = run.take(run.begin(), [change])
    assert np.isnan(state.reference["w"][5, 7]) and np.all(np.isnan(stacked["w"][:, 5, 7]))
    assert np.sum(np.isnan(state.reference["w"])) == 1


@pytest.mark.parametrize(
    "fields, words",
    (
        ({"every": 0}, "every=0"),
        ({"every": 3, "fragments": 4}, "fragments=4"),
        ({"delay": 20}, "delay=20"),
        ({"mixing": 1.5}, "mixing=1.5"),
        ({"method": "nothing"}, "nothing"),
        ({"outer": 0.7}, r"outer=0\.7"),
    ),
)
def test_impossible_fields_are_refused(fields, words):
    with pytest.raises(TypeError if "outer" in fields else ValueError, match=words):
        LocalSGD(axis_name="data", **fields)


def test_init_takes_floating_parameters_that_all_workers_share(data_mesh):
    mesh = data_mesh(WORKERS)

    def init(params, in_specs=P(), **fields):
        local_sgd = LocalSGD(axis_name="data", **fields)
        specs = local_sgd.state_specs
        return jax.shard_map(local_sgd.init, mesh=mesh, in_specs=in_specs, out_specs=specs)(params)

    with pytest.raises(TypeError, match=r"params\['n'\] has dtype int32"):
        init({"n": np.arange(4, dtype=np.int32)})
    with pytest.raises(ValueError, match="varies over axis 'data'"):
        init({"w": np.zeros((4, 8), np.float32)}, P("data"))
    with pytest.raises(ValueError, match="fragments=5 is more than the 4 pieces that 1 leaves"):
        init({"w": np.zeros((3, 4), np.float32)}, fragments=5)


def test_a_leaf_is_cut_where_its_spec_leaves_it_whole():
    """A spec may name fewer dimensions than the leaf has."""
    leaf = np.arange(2 * 3 * 12).reshape(2, 3, 12)
    fragments = Fragments.of([leaf], [P("model")], 4)
    parts = [fragments.take([leaf], number)[0] for number in range(4)]
    assert [part.shape for part in parts] == [(2, 3, 3)] * 4
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), leaf)


@given(
    st.lists(
        st.tuples(st.sampled_from((1, 7, 24)), st.sampled_from((0, 2, 16))), min_size=1, max_size=8
    ),
    st.integers(1, 6),
    st.sampled_from((P(), P("fsdp"), P(None, "fsdp"))),
)
def test_fragments_are_balanced_and_whole_together(shapes, count, spec):
    tree = {
        str(number): np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        for number, (rows, columns) in enumerate(shapes)
    }
    try:
        fragments = Fragments.of(tree, [spec] * len(tree), count)
    except ValueError as error:
        assert f"fragments={count} is more than the" in str(error)
        assert len(tree) < count
        return
    parts = [fragments.take(tree, number) for number in range(count)]
    assert all(jax.tree.leaves(part) for part in parts)
    assert sum(leaf.size for leaf in jax.tree.leaves(parts)) == sum(x.size for x in tree.values())
    together = jax.tree.map(np.zeros_like, tree)
    for number, part in enumerate(parts):
        together = fragments.put(together, number, part)
    jax.tree.map(np.testing.assert_array_equal, together, tree)
    for name, leaf in ((name, leaf) for part in parts for name, leaf in part.items()):
        split = [dimension for dimension, axis in enumerate(spec) if axis and leaf is not None]
        assert all(leaf.shape[dimension] == tree[name].shape[dimension] for dimension in split)
    filled = [sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts]
    assert max(filled) - min(filled) <= max(leaf.size for leaf in jax.tree.leaves(parts))
    if spec == P() and all(rows >= count for rows, _ in shapes):  # pieces as small as wanted
        share = sum(filled) / count
        assert max(leaf.size for leaf in jax.tree.leaves(parts)) <= share + 16


def test_layers_that_are_stacked_go_to_all_fragments():
    """Nearly all is one leaf, as in a model that scans over its layers."""
    tree = {"layers": np.zeros((8, 16, 16), np.float32), "norm": np.zeros(16, np.float32)}
    how = dataclasses.replace(EVERY_LEAF, method="bf16")
    local_sgd = LocalSGD(axis_name="data", fragments=4, method=how)
    parts = local_sgd.split(tree)
    assert [part["layers"].shape for part in parts] == [(2, 16, 16)] * 4
    sent = [report.bytes_per_worker for report in local_sgd.wire_report(tree, WORKERS)]
    whole = dq.wire_report(tree, WORKERS, method=how).bytes_per_worker
    assert whole / 4 <= max(sent) < whole / 4 + 100
