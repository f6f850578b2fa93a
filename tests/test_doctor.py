"""`dynamiq-jax doctor`: scripts and texts of programs."""

import json
import pathlib
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._commands.doctor import Doctor, parse_mesh
from dynamiq_jax._workshop.errors import CommandError
from tests.support.commands import command

SCRIPT = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import dynamiq_jax as dq

devices = jax.devices()[: int(sys.argv[1])]
mesh = jax.make_mesh((len(devices),), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
w, x = jnp.zeros((128, 256)), jnp.ones((64, 128))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False)
def train_step(w, x, key):
    grads = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    if "twice" in sys.argv:
        grads = jax.lax.pmean(grads, "data")
    return w - 0.1 * dq.pmean(grads, "data", key=key)

w = train_step(w, x, jax.random.key(0))
raise RuntimeError("trained")
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_run_until_its_step_is_compiled(script, tmp_path):
    """The step would be followed by an error."""
    kept = tmp_path / "found.json"
    options = ("--cpu-devices", "4", "--json", str(kept))
    ended = command("doctor", str(script), *options, "--", "4", "twice")
    assert ended.returncode == 1
    assert "double reduction" in ended.stdout
    assert "train.py:16" in ended.stdout and "train.py:17" in ended.stdout
    results = json.loads(kept.read_text())["results"]
    assert [finding["kind"] for finding in results["findings"]] == ["double reduction"]
    sent = {row["what"]: row["bytes"] for row in results["collectives"] if row["type"] == "f32"}
    assert sent == {"all-reduce": 2 * 3 / 4 * 4 * 128 * 256}


def test_a_sound_script_has_the_status_of_success(script, capsys):
    assert Doctor(target=script, arguments=("4",)).run() == 0
    shown = capsys.readouterr().out
    assert "compressed, DynamiQ()" in shown and "No mistake found" in shown


def test_a_script_on_one_device_has_one_worker(script, capsys):
    """No program sends anything, but the plans of collectives are known; the script goes on."""
    script.write_text(SCRIPT.replace("raise RuntimeError", "print"))
    assert Doctor(target=script, arguments=("1",)).run() == 1
    assert "one worker" in capsys.readouterr().out


def test_an_error_of_the_library_becomes_a_finding(script, capsys):
    script.write_text(SCRIPT.replace(", check_vma=False", ""))
    assert Doctor(target=script, arguments=("4",)).run() == 1
    shown = capsys.readouterr().out
    assert "double reduction" in shown and "The step raises an error" in shown


def test_errors_of_a_script_are_its_own(script):
    with pytest.raises(RuntimeError, match="trained"):
        Doctor(target=script, arguments=("4",), least="1Gi").run()


def test_a_script_without_a_step_is_an_error(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(CommandError, match="without a program in which each device sends 4KiB"):
        Doctor(target=path).run()


def test_a_program_is_read_from_its_text(tmp_path, data_mesh, capsys):
    step = jax.shard_map(
        lambda grads: dq.pmean(grads, "data", key=jax.random.key(0), method="dynamiq:4"),
        mesh=data_mesh(4),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    path = tmp_path / "step.hlo"
    path.write_text(jax.jit(step).lower(jnp.zeros((64, 1024))).compile().as_text())
    assert Doctor(target=path).run() == 0
    assert "groups of 4" in capsys.readouterr().out
    assert Doctor(target=path, mesh=("hosts=4",), devices_per_host=1).run() == 0
    shown = capsys.readouterr().out
    assert "DynamiQ(bits=4)" in shown and "hosts" in shown and "between hosts" in shown


def test_a_script_whose_step_is_smaller_is_an_error(script):
    script.write_text(SCRIPT.replace("raise RuntimeError", "print"))
    with pytest.raises(CommandError, match="Give a smaller --least"):
        Doctor(target=script, arguments=("4",), least="1Gi").run()


def test_what_is_neither_is_an_error(tmp_path):
    with pytest.raises(CommandError, match="no file"):
        Doctor(target=tmp_path / "missing.py").run()
    path = tmp_path / "step.mlir"
    path.write_text(textwrap.dedent("module @jit_step {}"))
    with pytest.raises(CommandError, match="neither a script"):
        Doctor(target=path).run()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommandError, match="neither a script"):
        Doctor(target=path).run()
    with pytest.raises(CommandError, match="--devices-per-host is 0"):
        Doctor(target=path, devices_per_host=0).run()


@pytest.mark.parametrize("texts", (("data",), ("data=0",), ("data=x",), ("data=2", "data=4")))
def test_a_mesh_is_written_as_axes_with_sizes(texts):
    assert parse_mesh(("data=4", "model=2")) == {"data": 4, "model": 2}
    with pytest.raises(CommandError, match="--mesh: 'data"):
        parse_mesh(texts)
