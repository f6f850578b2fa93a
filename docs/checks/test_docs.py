"""Pages: Python runs as shown, that of the README on one CPU, and the diffs of the pages on how to
start are true.
"""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from docs.scripts.pages import PAGES, ROOT, code_blocks, printed, shown

README = PAGES["README.md"]
AROUND_A_STEP, IN_A_SHARD_MAP = (
    code_blocks(PAGES[f"docs/{page}.md"], "diff")[0]
    for page in ("getting_started", "recipes/by_hand")
)
CAST = '  params = jax.lax.pcast(params, "data", to="varying")\n'


def applied(diff: str, sign: str) -> str:
    """Return the lines of a diff before it ("-") or after it ("+")."""
    lines = [line for line in diff.splitlines() if line[0] in f" {sign}"]
    assert len(lines) < len(diff.splitlines()) or "- " not in diff
    return textwrap.dedent("\n".join(line[2:] for line in lines))


@pytest.fixture(scope="module")
def setting(data_mesh):
    """The names that the diffs use."""
    random = jax.random.split(jax.random.key(0), 3)

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    params = {"w": 0.1 * jax.random.normal(random[0], (128, 32))}
    x, y = jax.random.normal(random[1], (64, 128)), jax.random.normal(random[2], (64, 32))
    names = {"jax": jax, "dq": dq, "loss_fn": loss_fn, "mesh": data_mesh(4)}
    return {**names, "params": params, "batch": {"x": x, "y": y}, "key": jax.random.key(1)}


def exact_gradients(setting):
    return jax.grad(setting["loss_fn"])(setting["params"], setting["batch"])


def gradients_of(code: str, setting):
    """Run code inside a shard_map with the defaults of JAX, and return its `grads`."""

    def step(params, batch, key):
        namespace = {**setting, "params": params, "batch": batch, "key": key}
        exec(code, namespace)
        return namespace["grads"]

    mapped = jax.shard_map(
        step, mesh=setting["mesh"], in_specs=(P(), P("data"), P()), out_specs=P()
    )
    return jax.jit(mapped)(setting["params"], setting["batch"], setting["key"])


def test_the_example_prints_what_it_shows_in_a_new_process():
    """It is the first that a user runs, so it has one CPU device until it makes more."""
    environment = {name: value for name, value in os.environ.items() if "JAX" not in name}
    environment["PYTHONPATH"] = str(ROOT)
    (code,) = code_blocks(README, "python")
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    (output,) = code_blocks(README, "text")
    assert run.stdout == output
    assert len(output.splitlines()) == 3


LONG = ("recipes/", "workers/", "extensions", "troubleshooting")  # pages


@pytest.mark.parametrize(
    "page",
    [
        # Whole training steps, and a kernel that is interpreted.
        pytest.param(page, marks=pytest.mark.slow if any(part in page for part in LONG) else ())
        for page in PAGES
        # That of the README makes devices of its own.
        if code_blocks(PAGES[page], "python") and page != "README.md" and "research" not in page
    ],
)
def test_python_of_a_page_runs_in_order_and_prints_its_comments(page):
    """In one namespace, on eight devices. A comment behind `print` is the line that it prints."""
    assert printed(page) == shown(page)


def test_the_diff_around_a_step_compresses_its_sums(setting):
    """The step is as its author wrote it: JAX sums the gradients."""

    @jax.jit
    @jax.shard_map(mesh=setting["mesh"], in_specs=(P(), P("data"), P("data")), out_specs=P())
    def train_step(params, x, y):
        def mean_loss(params):
            return jax.lax.pmean(setting["loss_fn"](params, {"x": x, "y": y}), "data")

        loss, gradient = jax.value_and_grad(mean_loss)(params)
        return jax.tree.map(jnp.subtract, params, gradient), loss

    namespace = {**setting, **setting["batch"], "train_step": train_step}
    exec(applied(AROUND_A_STEP, "+"), namespace)
    sent = jax.tree.map(jnp.subtract, setting["params"], namespace["params"])
    assert 1e-3 < dq.vnmse(sent, exact_gradients(setting)) < 3e-2


def test_the_diff_in_a_shard_map_is_true_under_the_defaults_of_jax(setting):
    exact = exact_gradients(setting)
    before = gradients_of(applied(IN_A_SHARD_MAP, "-"), setting)
    after = gradients_of(applied(IN_A_SHARD_MAP, "+"), setting)
    assert dq.vnmse(before, exact) < 1e-12
    assert 1e-3 < dq.vnmse(after, exact) < 3e-2


def test_the_diff_in_a_shard_map_needs_its_cast(setting):
    """Without it, gradients are sums already: of JAX alone, without an error."""
    assert CAST in IN_A_SHARD_MAP
    diff = IN_A_SHARD_MAP.replace(CAST, "")
    with pytest.raises(ValueError, match=r"jax\.lax\.pcast"):
        gradients_of(applied(diff, "+"), setting)
    exact = exact_gradients(setting)
    summed = jax.tree.map(lambda grad: 4 * grad, exact)
    assert dq.vnmse(gradients_of(applied(diff, "-"), setting), summed) < 1e-12
