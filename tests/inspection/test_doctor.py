"""`dynamiq-jax doctor`: scripts and texts of programs."""

import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._commands.doctor import Doctor, parse_mesh
from dynamiq_jax._console.errors import CommandError
from tests.inspection.test_inspect import mapped, mesh_of
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


@pytest.mark.slow
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
    assert "By default, the codec runs on cpu by" in shown


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


def test_a_program_is_read_from_its_text(tmp_path, capsys):
    path = tmp_path / "step.hlo"
    path.write_text(compiled_text("dynamiq:4"))
    assert Doctor(target=path).run() == 0
    assert "groups of 4" in capsys.readouterr().out
    assert Doctor(target=path, mesh=("hosts=4",), devices_per_host=1).run() == 0
    shown = capsys.readouterr().out
    assert "DynamiQ(bits=4)" in shown and "hosts" in shown and "between hosts" in shown


def test_axes_of_workers_are_those_of_the_mesh(tmp_path, script):
    with pytest.raises(CommandError, match="--workers: 'data' is no axis of --mesh"):
        Doctor(target=script, arguments=("4",), workers=("data",), mesh=("hosts=4",)).run()
    path = tmp_path / "step.hlo"
    path.write_text(compiled_text())
    assert Doctor(target=path, mesh=("data=4",), workers=("data",)).run() == 0


@functools.cache
def compiled_text(method: str = "bf16") -> str:
    """Return the text of a sound program, with a loop, fused operations and tables of lines."""

    def mean(grads):
        return dq.pmean(grads, "data", key=jax.random.key(0), method=method)

    step = mapped(mean, mesh_of(data=4), P())
    return step.lower(jnp.zeros((64, 1024))).compile().as_text()


def doctored(text: str) -> tuple[float, list[str]]:
    """Return the bytes and the kinds of mistakes that the command finds in a text."""
    with tempfile.TemporaryDirectory() as folder:
        path, kept = pathlib.Path(folder) / "step.hlo", pathlib.Path(folder) / "found.json"
        path.write_text(text)
        status = Doctor(target=path, json=kept).run()
        found = json.loads(kept.read_text())["results"]
    assert status == bool(found["findings"])
    kinds = [finding["kind"] for finding in found["findings"]]
    return sum(row["bytes"] for row in found["collectives"]), kinds


@given(st.floats(0, 1, exclude_max=True))
@example(0.5)
@example(0.999)
def test_a_part_of_a_program_is_never_sound(share):
    whole = compiled_text().rstrip()
    with pytest.raises(CommandError, match=r"step\.hlo.* (cut off|neither).*Write"):
        doctored(whole[: int(share * len(whole))])


MANY = 10**12
SUM = """\
HloModule jit_step, num_partitions=4

%body (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  ROOT %again = f32[64]{0} abs(%a)
}

ENTRY %main (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %summed = f32[64]{0} all-reduce(%p), GROUPS, to_apply=%body
}
"""


def test_a_program_without_tables_is_read():
    assert doctored(SUM.replace("GROUPS", "replica_groups=[2,2]<=[4]")) == (256, [])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    (
        ("ENTRY ", "", "cut off"),
        ("abs(%a)", "abs(%a", "cannot be read: ValueError"),
        ("GROUPS", "replica_groups={{0,1},{2}}", "cannot be read: .*inhomogeneous shape"),
        ("GROUPS", "replica_groups={{},{}}", "cannot be read: .*ZeroDivisionError"),
        ("GROUPS", f"replica_groups=[1,{MANY}]<=[{MANY}]", f"cannot be read: .*of {MANY} devices"),
        ("GROUPS", f"replica_groups=mesh['a'={MANY}] {{'a'}}", f".*of {MANY} devices"),
        ("GROUPS", "replica_groups=[0,4]<=[0]", "cannot be read: .*of 0 devices"),
        ("GROUPS", "replica_groups=[2,3]<=[4]", r".*reshape array of size 4 into shape \(2,3\)"),
        ("GROUPS", "replica_groups=mesh['a'=2] {'b'}", "cannot be read: .*KeyError"),
        ("num_partitions=4", f"num_partitions={MANY}", f"cannot be read: .*of {MANY} devices"),
    ),
)
def test_programs_that_cannot_be_are_errors(old, new, says):
    with pytest.raises(CommandError, match=f"{says}.*Write step"):
        doctored(SUM.replace(old, new).replace("GROUPS", "replica_groups={}"))


@pytest.mark.parametrize("content", (b"module @jit_step {}", b"\xff\xfe\x00"))
def test_what_is_neither_is_an_error(tmp_path, content):
    path = tmp_path / "step.mlir"
    with pytest.raises(CommandError, match="no file"):
        Doctor(target=path).run()
    path.write_bytes(content)
    with pytest.raises(CommandError, match="neither a script"):
        Doctor(target=path).run()
    with pytest.raises(CommandError, match="--devices-per-host is 0"):
        Doctor(target=path, devices_per_host=0).run()


def test_options_that_do_not_fit_a_program_are_errors(tmp_path):
    path = tmp_path / "step.hlo"
    path.write_text(compiled_text())
    for options, says in (
        ({"mesh": ("hosts=4", "local=4")}, "--mesh: hosts=4 local=4 has 16 devices"),
        ({"cpu_devices": 4}, "--cpu-devices is for a script"),
        ({"least": "1Mi"}, "--least and arguments are for a script"),
        ({"arguments": ("--batch", "4")}, "--least and arguments are for a script"),
        ({"devices_per_host": 2}, "--devices-per-host needs --mesh"),
        ({"mesh": ("data=4",), "workers": ("datta",)}, "'datta' is no axis of --mesh: data=4"),
    ):
        with pytest.raises(CommandError, match=says):
            Doctor(target=path, **options).run()


@pytest.mark.parametrize("texts", ("data", "data=0", "data=x", "data=2 data=4"))
def test_a_mesh_is_written_as_axes_with_sizes(texts):
    assert parse_mesh(("data=4", "model=2")) == {"data": 4, "model": 2}
    with pytest.raises(CommandError, match="--mesh: 'data"):
        parse_mesh(tuple(texts.split()))
    with pytest.raises(CommandError, match=r"--mesh: .*more than 1048576 devices"):
        parse_mesh(("data=1000000", "model=1000000"))
