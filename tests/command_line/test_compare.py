"""`dynamiq-jax compare`: what it reads, what it measures, and what it says."""

import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import dynamiq_jax as dq
from dynamiq_jax._commands.compare import DEFAULTS, Compare
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._measurement import gradient_files
from dynamiq_jax._measurement.settings import parse_setting, parse_settings
from dynamiq_jax._measurement.simulate import Simulation, codec_ns, geometric_mean, relative_errors
from dynamiq_jax.methods import METHODS, ErrorFeedback
from dynamiq_jax.methods._registry import PRESETS
from tests.support.commands import run_here
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import simulated

WORKERS = 4
SMALL = "dynamiq:6:widths=(4,8)"  # compiles in a third of the time of the default


def two_leaves() -> dict[str, np.ndarray]:
    return {
        "dense/kernel": of_workers(0, WORKERS, 64 * 96).reshape(WORKERS, 64, 96),
        "embedding": of_workers(1, WORKERS, 5000),
    }


# -------------------------------------------------------------------------------- what it reads


def test_files_hold_steps_of_parameters(tmp_path):
    arrays = {
        f"{step}/{name}": step * leaf for step in (1, 20) for name, leaf in two_leaves().items()
    }
    arrays["1/bias"] = np.ones((WORKERS, 8))
    np.savez(tmp_path / "g.npz", **arrays)
    steps = gradient_files.load(tmp_path / "g.npz")
    assert list(steps) == ["step 1", "step 20"]
    shapes = {name: leaf.shape for name, leaf in steps["step 1"].items()}
    assert shapes == {"dense/kernel": (WORKERS, 64, 96), "embedding": (WORKERS, 5000)}
    np.testing.assert_array_equal(steps["step 20"]["embedding"], 20 * two_leaves()["embedding"])


def test_safetensors_and_half_precision_are_read_as_well(tmp_path):
    arrays = {name: leaf.astype(np.float16) for name, leaf in two_leaves().items()}
    save_file(arrays, tmp_path / "g.safetensors")
    (label, found), *none = gradient_files.load(tmp_path / "g.safetensors").items()
    assert (label, none) == ("", [])
    assert found["embedding"].dtype == np.float32
    np.testing.assert_array_equal(found["embedding"], arrays["embedding"].astype(np.float32))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"w": np.ones(5000)}, "first axis is the worker"),
        ({"w": np.full((4, 5000), np.nan)}, "NaN or Inf"),
        ({"w": np.ones((4, 10))}, "no array of 1024 coordinates"),
        ({"w": np.ones((4, 5000)), "v": np.ones((3, 5000))}, r"\[3, 4\] workers"),
        ({"w": np.ones((0, 5000))}, "first axis is the worker"),
        ({"w": np.ones((4, 5000), complex)}, "'w' has dtype complex128. Give real numbers"),
        ({"w": np.full((4, 5000), "x")}, "'w' has dtype <U1. Give real numbers"),
        (
            {"1/w": np.ones((4, 50, 100)), "20/w": np.ones((4, 100, 50))},
            "'w' of step 20 is not as in step 1, .* Give all steps the same",
        ),
        (
            {"1/w": np.ones((4, 5000)), "1/v": np.ones((4, 5000)), "20/w": np.ones((4, 5000))},
            "'v' of step 20 is not as in step 1, or has less than 1024 coordinates in one",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, arrays, says):
    np.savez(tmp_path / "g.npz", **arrays)
    with pytest.raises(CommandError, match=says):
        gradient_files.load(tmp_path / "g.npz")


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(CommandError, match="no such file"):
        gradient_files.load(tmp_path / "missing.npz")
    (tmp_path / "g.txt").write_text("")
    with pytest.raises(CommandError, match=r"\.npz or a \.safetensors"):
        gradient_files.load(tmp_path / "g.txt")


@pytest.mark.parametrize("content", (b"", b"PK\x03\x04", b"nothing", b"\x93NUMPY"))
@pytest.mark.parametrize("suffix", ("npz", "safetensors"))
def test_damaged_files_are_refused(tmp_path, suffix, content):
    path = tmp_path / f"g.{suffix}"
    path.write_bytes(content)
    with pytest.raises(CommandError, match=rf"--gradients .*cannot be read as \.{suffix}.* wrote"):
        gradient_files.load(path)


def test_an_archive_of_other_files_is_refused(tmp_path):
    """NumPy returns the bytes of a member that is no .npy file."""
    np.savez(tmp_path / "g.npz", w=np.ones((4, 5000)))
    with zipfile.ZipFile(tmp_path / "g.npz", "a") as archive:
        archive.writestr("notes.txt", "of last week")
    with pytest.raises(CommandError, match=r"g\.npz.*member 'notes\.txt' is no \.npy.*np\.savez"):
        gradient_files.load(tmp_path / "g.npz")


def test_leaves_that_training_keeps_exact_are_left_out(tmp_path):
    """Those, and no others, that a call with default options does not compress."""
    sizes = [1, 576, 1023, 1024, 1025, 4096]
    leaves = {f"w{size}": np.ones((WORKERS, size), np.float32) for size in sizes}
    np.savez(tmp_path / "g.npz", **leaves)
    ((_, found),) = gradient_files.load(tmp_path / "g.npz").items()
    own = {name: leaf[0] for name, leaf in leaves.items()}
    report = dq.wire_report(own, WORKERS, method="blockint")
    compressed = {leaf.path for leaf in report.leaves if leaf.method is not None}
    assert {name.strip("[]'") for name in compressed} == found.keys()


# ---------------------------------------------------------------------- how methods are written


def test_presets_and_error_feedback_can_be_written():
    assert parse_setting("paper:4").method == dq.DynamiQ.paper(bits=4.0)
    assert parse_setting("qgz").method == PRESETS["qgz"]()
    feedback = parse_setting("ef+blockint:code_bits=4:ring").method
    assert isinstance(feedback, ErrorFeedback)
    assert feedback.inner == METHODS["blockint"](code_bits=4)


def test_defaults_are_possible_on_every_topology_and_show_every_method():
    settings = parse_settings([f"{name}:{t}" for name in DEFAULTS for t in ("ring", "all_to_all")])
    shown_methods = {type(setting.method) for setting in settings}
    assert {*METHODS.values()} - shown_methods <= {dq.methods.Exact, ErrorFeedback}


# -------------------------------------------------------------------------------- what it measures


def test_errors_are_those_of_the_sum():
    gradients = two_leaves()
    found = Simulation(parse_setting(f"{SMALL}:ring"), gradients)(gradients, range(2))
    size = sum(leaf[0].size for leaf in gradients.values())
    assert 1e-6 < found.vnmse < 1e-2
    assert 1e-6 < found.relative < 1
    assert found.above_half == 0
    assert found.gain == pytest.approx(1, abs=10 * np.sqrt(found.vnmse / size))
    assert found.replicas_equal and found.seconds > 0


def test_errors_of_rows_are_relative_and_leave_out_zeros():
    """Rows whose values are all off by a share of themselves; the last one is shorter."""
    shares = np.array([0.0, 0.5, 2.0, 0.8])
    truth = np.repeat(10.0 ** np.arange(-8, 8, 4), 256)[:1000]
    estimate = truth * (1 + np.repeat(shares, 256)[:1000])
    found = relative_errors(np.append(estimate, np.zeros(536)), np.append(truth, np.zeros(536)))
    np.testing.assert_allclose(found, shares**2)


def test_too_few_devices_are_refused():
    gradients = {"w": np.ones((9, 2048), np.float32)}
    with pytest.raises(ValueError, match="9 workers, but there are 8 devices"):
        Simulation(parse_setting("exact:ring"), gradients)


def test_a_biased_method_shows_its_gain():
    class Half:
        name = "half"

        def all_reduce(self, tree, axis_name, key):
            sums = jax.tree.map(lambda leaf: jax.lax.psum(leaf, axis_name), tree)
            return {name: leaf.at[::2].set(0) for name, leaf in sums.items()}

    gradients = two_leaves()
    kept = Simulation(Half(), gradients)(gradients, (0,))
    assert 0.3 < kept.gain < 1
    # What is left out is orthogonal to what is kept.
    assert kept.vnmse == pytest.approx(1 - kept.gain, rel=0.01)


def test_replicas_are_compared_bit_by_bit():
    class Signed:
        name = "zeros of two signs"

        def all_reduce(self, tree, axis_name, key):
            sign = jnp.where(jax.lax.axis_index(axis_name) == 0, jnp.float32(-1), jnp.float32(1))
            return {name: jnp.zeros_like(leaf) * sign for name, leaf in tree.items()}

    gradients = two_leaves()
    assert not Simulation(Signed(), gradients)(gradients, (0,)).replicas_equal


def test_workers_are_the_first_of_a_file():
    gradients = {"w": np.arange(12).reshape(4, 3)}
    first = gradient_files.of_workers(gradients, 2)["w"]
    np.testing.assert_array_equal(first, [[0, 1, 2], [3, 4, 5]])


def test_errors_of_several_steps_have_a_geometric_mean():
    assert geometric_mean((1e-4, 1e-2)) == pytest.approx(1e-3)
    assert geometric_mean((0.0, 4.0)) == pytest.approx(4.0)
    assert geometric_mean((0.0,)) == 0


def test_codec_time_is_that_of_one_core(monkeypatch):
    monkeypatch.setattr("dynamiq_jax._measurement.simulate.num_cores", lambda: 2)
    assert codec_ns(0.04, 10**6, 8) == pytest.approx(10.0)


def flat(tree) -> np.ndarray:
    return np.concatenate([tree[name].reshape(-1) for name in sorted(tree)])


def test_vnmse_is_what_it_is_elsewhere():
    gradients = two_leaves()
    setting = parse_setting("blockint:4:ring")
    found = Simulation(setting, gradients)(gradients, (0,))
    all_reduce = simulated(lambda key, tree: setting.all_reduce(tree, "data", key))
    sums = all_reduce(jax.random.key(0), gradients)
    first = {name: np.asarray(leaf[0]) for name, leaf in sums.items()}
    truth = {name: leaf.sum(0, np.float64) for name, leaf in gradients.items()}
    assert found.vnmse == pytest.approx(vnmse(flat(first), flat(truth)), rel=1e-6)


# ------------------------------------------------------------------------------------ the command


def test_it_compares_from_the_command_line(tmp_path, monkeypatch, capsys):
    np.savez(tmp_path / "g.npz", **{f"20/{name}": leaf for name, leaf in two_leaves().items()})
    arguments = (
        *("--gradients", str(tmp_path / "g.npz"), "--workers", "2", "4"),
        *("--methods", "blockint:4", "blockint:code_bits=5"),
        *("--topologies", "ring", "all_to_all", "--link", "1gbit"),
        *("--json", str(tmp_path / "c.json")),
    )
    assert run_here(monkeypatch, "compare", *arguments) == 0
    text = capsys.readouterr().out
    assert "vNMSE step 20" in text and "blockint:code_bits=5" in text and "at 1 Gbit/s" in text
    record = json.loads((tmp_path / "c.json").read_text())
    rows = {(r["method"], r["topology"], r["workers"]): r for r in record["results"]}
    assert len(rows) == len(record["results"]) == 2 * 2 * 2
    for row in rows.values():
        wire = 8 * row["bytes_per_worker"] / 1e9
        assert row["seconds"] == pytest.approx(wire + 1e-9 * row["codec_ns"] * row["size"])
        assert row["replicas_equal"]
    four, five = (rows[f"blockint:{bits}", "ring", 4] for bits in ("4", "code_bits=5"))
    assert 2 < four["vnmse"] / five["vnmse"] < 8
    assert rows["blockint:4", "all_to_all", 4]["vnmse"] < four["vnmse"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": (1,)}, "2 to 64"),
        ({"workers": (65,)}, "2 to 64"),
        ({"topologies": ("star",)}, "'star' is not known"),
        ({"methods": ("nothing",)}, "--methods: 'nothing':"),
        ({"methods": ()}, "--methods: nothing to measure"),
        ({"methods": ("bf16", "bf16:all_to_all")}, "'bf16:all_to_all' .* --topologies all_to_all"),
        ({"gradients": Path("g.npz"), "size": "5M"}, "--size is of made-up gradients"),
        ({"methods": ("dynamiq:5:auto",)}, "'auto' is not an option of dynamiq"),
        ({"methods": ("psum",)}, "--methods: 'psum' is not simulated. Give 'exact'"),
        ({"topologies": ("butterfly",), "workers": (6,)}, "does not support --workers 6"),
        ({"seeds": 0}, "at least 1"),
    ],
)
def test_mistakes_are_refused(options, says):
    with pytest.raises(CommandError, match=says):
        Compare(**options).run()


def test_gradients_that_cancel_are_refused(tmp_path):
    one = of_workers(0, 1, 5000)
    for values in (np.concatenate([one, -one, one]), np.zeros((3, 5000))):
        np.savez(tmp_path / "g.npz", **{"20/w": values})
        with pytest.raises(CommandError, match=r"sum over 2 workers is zero .* at step 20"):
            Compare(gradients=tmp_path / "g.npz", workers=(2, 3)).run()


def test_more_workers_than_the_file_has_are_refused(tmp_path):
    np.savez(tmp_path / "g.npz", **two_leaves())
    with pytest.raises(CommandError, match=r"of 4\. Give at most 4"):
        Compare(gradients=tmp_path / "g.npz", workers=(8,)).run()


def test_a_topology_that_does_not_fit_is_left_out_and_said(tmp_path, capsys):
    np.savez(tmp_path / "g.npz", w=of_workers(0, 3, 5000))
    options = {"methods": ("bf16",), "topologies": ("ring", "butterfly"), "workers": (3,)}
    assert Compare(gradients=tmp_path / "g.npz", **options).run() == 0
    assert "1 left out" in capsys.readouterr().out
