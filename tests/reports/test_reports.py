"""Situations of others' users: scripts of theirs, and what has to come of them."""

import copy
import pathlib
import pickle
import sys
import tempfile
import threading
import time

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.experimental import serialize_executable
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import islands
from dynamiq_jax.methods import METHODS
from dynamiq_jax.topologies import TOPOLOGIES
from dynamiq_jax.training import LocalSGD
from tests.reports import setup
from tests.reports.setup import gradient, loss_fn, mean_of, mesh_of, normal, on_workers, train_step
from tests.support import processes

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_users_have_it(capsys):
    """Types are promoted, and nothing is printed by Python: XLA logs what a busy machine delays."""
    with jax.numpy_dtype_promotion("standard"):
        yield
    assert capsys.readouterr() == ("", "")


def test_another_default_generator():
    """JAX: another default generator of random numbers, as on TPUs for speed."""
    gradients = normal(2, 2048)
    with jax.default_prng_impl("rbg"):
        for key in (jax.random.key(3), jax.random.PRNGKey(3)):
            mean = on_workers(
                lambda g, key=key: dq.pmean(g, "data", key=key, method="mxfp8"), gradients
            )
            assert (mean[0] == mean[1]).all(), "replicas differ"
            assert dq.vnmse(mean[0], gradients.mean(0)) < 0.05, "the mean is not close"


def test_caches_that_are_cleared():
    """JAX (jax#10828): programs clear the caches of JAX to free memory, and go on."""
    w, x = normal(64, 32), normal(8, 64, seed=1)
    grad_fn = gradient(loss_fn, mesh_of(), "mxfp8")
    before = grad_fn(w, x)
    jax.clear_caches()
    assert (grad_fn(w, x) == before).all(), "the compiled step"
    assert (jax.jit(grad_fn)(w, x) == before).all(), "a new trace of the same step"


def test_callback_inside_of_the_loss():
    """JAX (jax#25887): a debug callback in a loss, which may fail, vanish or run too often."""
    w, x = normal(64, 32), normal(8, 64, seed=1)

    def noisy_loss_fn(w, x):
        value = loss_fn(w, x)
        jax.debug.callback(lambda value: seen.append(float(value)), value)
        return value

    seen = []
    gradient(noisy_loss_fn, mesh_of())(w, x)
    jax.effects_barrier()
    assert len(seen) == 1, seen  # the program is one of all workers
    assert abs(seen[0] - loss_fn(w, x)) < 1e-5 * seen[0], (seen, loss_fn(w, x))


def test_compiled_step_from_a_file():
    """JAX: a compiled step is saved, so that a restarted job need not compile it again."""
    w, x = normal(64, 32), normal(16, 64, seed=1)
    mesh = mesh_of(8)

    # XLA cannot serialize what came from the cache of compiled programs: no run has had this name.
    def new_loss_fn(w, x):
        with jax.named_scope(f"run {time.time_ns()}"):
            return loss_fn(w, x)

    compiled = gradient(new_loss_fn, mesh, "mxfp8").lower(w, x).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    placed = jax.device_put((w, x), compiled.input_shardings[0])
    assert (loaded(*placed) == compiled(*placed)).all(), "the loaded step has other bits"


def test_data_axis_that_comes_last():
    """MaxText: the data axis behind a model axis in the mesh, which splits parameters."""
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=types)
    w, x = normal(32, 32), normal(8, 32, seed=1)
    whole, rows = NamedSharding(mesh, P("model")), NamedSharding(mesh, P("data"))
    step = jax.jit(jax.grad(loss_fn), in_shardings=(whole, rows), out_shardings=whole)
    grads = dq.compress(step, "data", method="bf16")(w, x)
    assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"


def test_devices_in_reverse_order():
    """JAX: a mesh whose devices are not in the order of their numbers, as topologies choose it."""
    mesh = Mesh(np.array(jax.devices()[3::-1]), ("data",))
    w, x = normal(32, 32), normal(8, 32, seed=1)
    placed = jax.device_put((w, x), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
    with_rows = jax.grad(lambda w, x: (loss_fn(w, x), x @ w), has_aux=True)
    grads, rows = dq.compress(jax.jit(with_rows), "data", method="bf16")(*placed)
    assert dq.vnmse(rows, x @ w) < 1e-9, "rows of aux are in another order than the batch"
    assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"


def test_frozen_part_of_a_model():
    """optax: labels choose an optimizer for each part of a model, and one part is frozen."""
    params, x = {"head": normal(64, 32), "base": normal(64, 32, seed=1)}, normal(8, 64, seed=2)

    def loss_fn(params, x):
        return ((x @ (params["head"] + params["base"])) ** 2).mean()

    tx = optax.partition(
        {
            "train": optax.chain(dq.all_reduce_gradients("data", method="bf16"), optax.sgd(0.1)),
            "freeze": optax.set_to_zero(),
        },
        {"head": "train", "base": "freeze"},
    )
    after, _ = train_step(tx, loss_fn)(params, tx.init(params), x)
    assert (after["base"] == params["base"]).all(), "a frozen part has moved"
    assert (after["head"] != params["head"]).any(), "the trained part has not"
    assert loss_fn(after, x) < loss_fn(params, x), "the loss has not fallen"


def test_hyperparameters_in_the_state():
    """optax#412: inject_hyperparams makes arrays of all numbers of a transformation.

    Then the seed and the first step of the all-reduce are traced too.
    """
    w, x = normal(64, 32), normal(8, 64, seed=1)
    reduction = optax.inject_hyperparams(dq.all_reduce_gradients)(axis_name="data", method="bf16")
    whole = optax.inject_hyperparams(
        lambda rate: optax.chain(dq.all_reduce_gradients("data", method="bf16"), optax.sgd(rate))
    )(rate=0.1)
    for tx, rate in ((optax.chain(reduction, optax.sgd(0.1)), 0.1), (whole, 0.1)):
        after, _ = train_step(tx, loss_fn)(w, tx.init(w), x)
        assert dq.vnmse((w - after) / rate, jax.grad(loss_fn)(w, x)) < 1e-4, "another update"


def test_keys_that_are_used_twice():
    """JAX (jax#192): a check that no key is used twice, which a library with one key must pass."""
    tree = {"kernel": normal(2, 2048), "bias": normal(2, 4)}
    with jax.debug_key_reuse(True):
        mean = mean_of(tree, "mxfp8")
    assert dq.vnmse(mean["kernel"][0], tree["kernel"].mean(0)) < 0.01


def test_last_devices_of_a_host():
    """JAX: a mesh without the default device, on which new arrays are made."""
    mesh = Mesh(np.array(jax.devices()[5:7]), ("data",))
    w, x = normal(64, 32), normal(8, 64, seed=1)
    grads = gradient(loss_fn, mesh)(w, x)
    assert {d.id for d in grads.devices()} == {5, 6}, "the gradient is on other devices"
    assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"


def test_map_over_the_optimizer_state():
    """optax: tools that find arrays like parameters in a state, by an `init` of placeholders."""
    params = {"w": jnp.ones((4, 4))}
    tx = optax.chain(dq.all_reduce_gradients("data"), optax.adam(1e-3))
    state = tx.init(params)
    marked = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf + 7, state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    assert marked[0].step == 0, "the step of the all-reduce is no parameter"
    assert (marked[1][0].mu["w"] == 7).all(), "the moments of Adam were not found"
    assert optax.tree_utils.tree_get(state, "step") == 0, "the step is not found by its name"


def test_mean_for_a_log_inside_of_the_loss():
    """JAX: a mean over workers for the log, inside of a loss that is differentiated (has_aux)."""
    w, x = normal(64, 32), normal(2, 8, 64, seed=1)

    def gradient(x, stopped):
        def loss_fn(w):
            out = x @ w
            logged = jax.lax.stop_gradient(out) if stopped else out
            options = dq.Compression(exact_below=0)
            return (out**2).mean(), dq.pmean(logged, "data", key=jax.random.key(0), method=options)

        return jax.value_and_grad(loss_fn, has_aux=True)(w)[0]

    on_workers(lambda x: gradient(x, stopped=True)[1], x)
    with pytest.raises(ValueError, match="cannot be differentiated"):
        on_workers(lambda x: gradient(x, stopped=False)[1], x)


def test_mean_in_a_loop_of_unknown_length():
    """JAX: a collective in a while loop whose length depends on its result, on all workers."""
    targets = normal(2, 2048)

    def solve(target):
        def step(carry):
            w, number, _ = carry
            key = jax.random.fold_in(jax.random.key(0), number)
            mean = dq.pmean(w - target, "data", key=key, method="mxfp8")
            return w - 0.5 * mean, number + 1, jnp.sum(mean**2)

        start = jnp.zeros_like(target), 0, jnp.float32(jnp.inf)
        return jax.lax.while_loop(lambda carry: carry[2] > 1.0, step, start)

    w, steps, _ = on_workers(solve, targets)
    assert (w[0] == w[1]).all() and steps[0] == steps[1], "workers ended in different steps"
    assert 3 < steps[0] < 50, steps
    assert dq.vnmse(w[0], targets.mean(0)) < 0.01, "it did not converge"


def test_mean_in_every_other_step():
    """PyTorch DDP: workers synchronize in some steps only (no_sync), chosen in the program."""
    gradients = normal(2, 2048)

    def step(g, number):
        key = jax.random.fold_in(jax.random.key(0), number)
        mean = lambda g: dq.pmean(g, "data", key=key, method="bf16")  # noqa: E731
        return jax.lax.cond(number % 2 == 0, mean, lambda g: g, g)

    for number in (0, 1):
        got = on_workers(step, gradients, jnp.full(2, number))
        expected = gradients if number else jnp.broadcast_to(gradients.mean(0), (2, 2048))
        assert dq.vnmse(got, expected) < 1e-4, number


def test_model_without_parameters():
    """flax: a model without any parameters, such as a baseline, in the step of others."""
    x = normal(8, 32)
    placed = jax.device_put(x, NamedSharding(mesh_of(), P("data")))
    step = jax.jit(jax.value_and_grad(lambda params, x: jnp.mean(x)))
    loss, grads = dq.compress(step, "data", missing_ok=True)({}, placed)
    assert grads == {}, grads
    assert abs(loss - x.mean()) < 1e-6, (loss, x.mean())


def test_modules_that_are_loaded_again():
    """JAX: a notebook loads a library again, and types and registered nodes exist twice."""
    ours = "dynamiq_jax", "pallas_kernels"
    names = [name for name in sys.modules if name.startswith(ours)]
    loaded = {name: sys.modules.pop(name) for name in names}
    try:
        import dynamiq_jax as again

        assert again is not dq
        placed = NamedSharding(mesh_of(), P()), NamedSharding(mesh_of(), P("data"))
        step = jax.jit(jax.grad(loss_fn), in_shardings=placed)
        w, x = normal(64, 32), normal(8, 64, seed=1)
        assert again.vnmse(again.compress(step, "data", method="bf16")(w, x), step(w, x)) < 1e-4
    finally:
        for name in [name for name in sys.modules if name.startswith(ours)]:
            del sys.modules[name]
        sys.modules.update(loaded)


def test_names_that_no_file_can_have():
    """orbax: parameters with slashes, spaces and umlauts in names, which become names of files."""
    params = {"größe/ä b.c": normal(64, 32), "x": {"y/z": normal(64, 32)}, "": normal(64, 32)}
    for _ in range(40):
        params = {"a_layer_with_a_rather_long_name": params}
    tx = dq.all_reduce_gradients("data", method="ef+bf16")
    specs = dq.AllReduceState(step=P(), method=P("data"), metrics=P())
    init = jax.shard_map(tx.init, mesh=mesh_of(), in_specs=P(), out_specs=specs)
    state = jax.jit(init)(params)
    assert all(name.isascii() and len(name) < 100 and "/" not in name for name in state.method)
    as_bytes = flax.serialization.to_bytes(state)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder) / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(pathlib.Path(folder) / "state", state)
    for again in (restored, flax.serialization.from_bytes(state, as_bytes)):
        assert jax.tree.structure(again) == jax.tree.structure(state), "another structure"


def test_no_transfers_after_the_first_step():
    """JAX: a guard against transfers between host and devices, after the first step of a run."""
    mesh = mesh_of()
    w = jax.device_put(normal(64, 32), NamedSharding(mesh, P()))
    x = jax.device_put(normal(8, 64, seed=1), NamedSharding(mesh, P("data")))
    grad_fn = gradient(loss_fn, mesh)
    first = grad_fn(w, x)
    with jax.transfer_guard("disallow"):
        second = grad_fn(w, x)
    assert (first == second).all()


def test_process_with_a_mesh_of_its_own():
    """JAX: of two processes, one evaluates on a mesh of its own devices, and the other never.

    A check that waits for all processes of the job, not for those of the mesh, would stop it.
    """
    processes.run(setup.evaluate, [()] * 2, devices=2)


def test_raw_key_of_another_generator():
    """A raw key of four numbers, of the generator "rbg", where raw keys of two are the default.

    jaxtyping#388: raw keys differ in length with the generator, which their type does not show.
    """
    key = jax.random.PRNGKey(0, impl="rbg")
    with pytest.raises(ValueError, match=r"key has shape \(4,\).*impl="):
        on_workers(lambda g: dq.pmean(g, "data", key=key), normal(2, 4096))


def test_seed_that_is_no_integer():
    """JAX: a seed of 1.5 or True from a configuration, which is rounded silently or traced."""
    for seed in (1.5, True, "3", None):
        for make in (dq.all_reduce_gradients, LocalSGD):
            with pytest.raises(ValueError, match=f"seed={seed!r}.*Give"):
                make(axis_name="data", seed=seed)
    for whole in (np.int64(3), jnp.int32(3), -1):
        dq.all_reduce_gradients("data", seed=whole)


def test_settings_that_are_copied_and_pickled():
    """PyTorch DDP (pytorch#75666): hooks with a state could not be pickled for a checkpoint."""
    tree = {"w": jnp.ones((64, 64))}
    objects = [
        *(METHODS[name]() for name in METHODS),
        *(topology() for topology in TOPOLOGIES.values()),
        dq.Compression(max_error=0.1),
        dq.Schedule({0: "exact", 5: "dynamiq:5"}),
        dq.wire_report(tree, 4, method={".*": "dynamiq:4"}),
        islands.encode(tree, key=jax.random.key(0), method="bf16"),
        dq.all_reduce_gradients("data").init(tree),
    ]
    for thing in objects:
        for again in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
            assert again == thing, thing


def test_threads_that_trace_at_once():
    """JAX: four threads, each with its own devices, trace and compile a step at the same time."""
    w, x = normal(64, 64), normal(8, 64, seed=1)
    found = {}

    def train(number):
        mesh = Mesh(np.array(jax.devices()[2 * number : 2 * number + 2]), ("data",))
        found[number] = gradient(loss_fn, mesh)(w[:, : 32 + 8 * number], x)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3], f"only {sorted(found)} ended well"
    for number, grads in found.items():
        assert dq.vnmse(grads, jax.grad(loss_fn)(w[:, : 32 + 8 * number], x)) < 1e-4, number


def test_tracers_that_leak():
    """JAX: a library keeps traced values in its caches, which `jax.checking_leaks` reports."""
    w, x = normal(64, 32), normal(8, 64, seed=1)
    with jax.checking_leaks():
        mean_of(normal(2, 2048), "bf16")
        grads = gradient(loss_fn, mesh_of())(w, x)
    assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4


def test_train_state_of_flax():
    """flax: TrainState.apply_gradients in a mapped step, whose optimizer has the all-reduce."""
    x = normal(8, 64, seed=1)

    def loss(params, x):
        return loss_fn(params["w"], x)

    tx = optax.chain(dq.all_reduce_gradients("data", method="bf16"), optax.adam(1e-2))
    state = TrainState.create(apply_fn=None, params={"w": normal(64, 32)}, tx=tx)

    @jax.jit
    def train_step(state, x):
        def step(state, x):
            return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

        specs = (P(), P("data"))
        mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=specs, out_specs=P(), check_vma=False)
        return mapped(state, x)

    before = loss(state.params, x)
    for _ in range(3):
        state = train_step(state, x)
    assert train_step._cache_size() <= 2, "the step was compiled again"
    assert state.step == 3 and state.opt_state[0].step == 3, "steps were not counted"
    assert loss(state.params, x) < before, "the loss has not fallen"


def test_two_methods_of_one_loss():
    """JAX: two wrappers of one function share a compiled program, as caches compare it."""
    w, x = normal(64, 32), normal(8, 64, seed=1)
    exact, rounded = (gradient(loss_fn, mesh_of(), method) for method in ("exact", "bf16"))
    grads = jax.jit(lambda w: (exact(w, x), rounded(w, x)))(w)
    errors = [float(dq.vnmse(each, jax.grad(loss_fn)(w, x))) for each in grads]
    assert errors[0] < 1e-10 < errors[1] < 1e-4, errors


def test_two_thousand_numbers():
    """NCCL: thousands of tensors of a single number, each with a message of its own."""
    tree = {f"scale_{n}": jnp.float32(n) for n in range(2000)}
    assert dq.wire_report(tree, 4).bytes_per_worker == 2 * 3 * 4 * 2000 // 4, "bytes of one message"
    program = jax.make_jaxpr(
        lambda t: dq.pmean(t, "data", key=jax.random.key(0)), axis_env=[("data", 4)]
    )(tree)
    assert str(program).count("psum") < 10, "there is a sum for each number"
