"""`dynamiq-jax verify`: broken backends are found and named."""

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from dynamiq_jax._commands import verify
from dynamiq_jax._commands.verify import Verify
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._measurement import kernel_checks
from dynamiq_jax._measurement.kernel_checks import CASES, KernelCheck, KernelVerdict
from pallas_kernels import differences
from pallas_kernels.codec.levels import SPACINGS
from pallas_kernels.codec.rounding import ROUNDINGS
from pallas_kernels.registry import BACKENDS, BASE
from pallas_kernels.trial import CALLS, HARD
from tests.support.broken_backends import BROKEN, backend
from tests.support.commands import command

CASE = "two widths"
HOP = KernelCheck("triton", "hop", CASE, "float32", KernelVerdict.SAME, checksum=5)
# All faults of `BROKEN` in one backend: operation, and what is said about it.
ALL_FAULTS = backend(
    statistics=BROKEN["an exception"][0].statistics,
    hop=BROKEN["one wrong bit"][0].hop,
    decompress_accumulate=BROKEN["a time-out"][0].hop,
    decompress=BROKEN["one wrong value"][0].decompress,
)
FOUND = {
    "statistics": "NotImplementedError: no lowering for shuffles",
    "compress": "1 of 7712 bytes differ",
    "hop": "1 of .* bytes differ",
    "hop of several": "1 of .* bytes differ",
    "decompress_accumulate": "TimeoutError: no result after 4 s",
    "decompress": ". of 113664 bytes differ, by more than rounding",
}


@pytest.fixture
def here(monkeypatch):
    """Verify on the first device of this process."""
    monkeypatch.setattr(Verify, "devices", lambda *_, **__: jax.devices()[:1])


def run(path, **options) -> tuple[int, dict]:
    """The exit status and the file of a run."""
    status = Verify(cases=(CASE,), **options, json=path).run()
    return status, json.loads(path.read_text(), parse_constant=pytest.fail)["results"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_every_fault_is_found_and_named(chosen_backend, tmp_path, capsys):
    chosen_backend(ALL_FAULTS)
    status, results = run(tmp_path / "out.json", timeout=4.0)
    assert status == 1
    for problem, (operation, said) in zip(results["problems"], FOUND.items(), strict=True):
        start = re.escape(f"triton: {operation} ({CASE}, float32): ")
        assert re.match(start + said, problem), problem
    # By default the base takes its place, and the library says so.
    assert results["refused"] == ["triton"]
    assert re.search("'triton' are not used on cpu: NotImplementedError", *results["warnings"])
    shown = capsys.readouterr().out
    assert all(problem.partition("\n")[0] in shown for problem in results["problems"])
    assert "attach the file of --json to an issue" in shown


@pytest.mark.usefixtures("here")
def test_a_right_backend_is_compared(chosen_backend, tmp_path, capsys):
    chosen_backend(backend())
    status, results = run(tmp_path / "out.json")
    assert status == 0
    assert results["problems"] == results["refused"] == results["warnings"] == []
    verdicts = {(c["operation"], c["case"]): c["verdict"] for c in results["checks"]}
    had = {name: "absent" if BASE.derives(CALLS[name]) else "same" for name in CALLS}
    assert verdicts == {(operation, CASE): verdict for operation, verdict in had.items()}
    compared = [c for c in results["checks"] if c["verdict"] == "same"]
    assert all(c["compared"] > 400 and c["differing"] == 0 for c in compared)
    assert {*results["not_compared"]} == {*BACKENDS} - {"triton"}
    shown = capsys.readouterr().out
    assert "By default, the codec runs on cpu by 'xla'; 'native' is not used: left out." in shown
    assert f"Right: {len(compared)} outputs of kernels." in shown
    assert shown.splitlines()[-1] == "`dynamiq-jax bench` measures the speed."


@pytest.mark.usefixtures("here")
def test_a_case_that_a_backend_does_not_take_is_no_problem(chosen_backend, tmp_path):
    """Such as geometric levels, for which the native codec leaves the work to the base."""
    right = backend()
    chosen_backend(right)
    of_case = CASES[CASE].trial().layout

    def why_not_for(operation, *arrays, layout=None):
        is_refused = operation is CALLS["hop"] and layout == of_case
        return "not these levels" if is_refused else None

    object.__setattr__(right, "why_not_for", why_not_for)
    status, results = run(tmp_path / "out.json")
    assert status == 0 and results["problems"] == []
    checks = {c["operation"]: c for c in results["checks"]}
    assert (checks["hop"]["verdict"], checks["hop"]["text"]) == ("absent", "not these levels")
    assert checks["decompress"]["verdict"] == "same"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("allow", [False, True])
def test_another_rounding_is_a_problem_unless_it_is_allowed(allow, tmp_path, monkeypatch):
    rounded = dataclasses.replace(HOP, compared=100, differing=1)
    checks = [HOP, rounded.ended(KernelVerdict.ROUNDING, "1 of 100 bytes")]
    monkeypatch.setattr(verify, "check_kernels", lambda *_, **__: checks)
    status, results = run(tmp_path / "out.json", allow_rounding=allow)
    assert status == (not allow)
    expected = ["triton: hop (two widths, float32): 1 of 100 bytes"]
    assert results["problems"] == ([] if allow else expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backends": ("cuda",)}, "--backends: 'cuda' is not there. Give some of xla, triton"),
        ({"backends": ()}, "--backends: nothing to verify. Give some of xla"),
        ({"cases": ("every",)}, "--cases: 'every' is not there. Give some of default"),
        ({"timeout": 0}, "--timeout is 0: give at least 1"),
        ({"process_id": 1}, "no --coordinator"),
        ({"json": pathlib.Path("/missing/out.json")}, "--json is /missing/out.json: no folder"),
    ],
)
def test_mistakes_end_in_one_line(options, says):
    with pytest.raises(CommandError) as error:
        Verify(**options).run()
    assert says in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------- what is compared


def test_the_cases_have_all_choices():
    methods = [case.method for case in CASES.values()]
    trials = [case.trial() for case in CASES.values()]
    assert {int(w) for trial in trials for w in trial.widths} == {0, *range(2, 17)}
    assert {m.group_size for m in methods} == {8, 16, 32}
    assert {trial.layout.quantizer.rounding for trial in trials} == set(ROUNDINGS)
    assert {m.spacing for m in methods} == set(SPACINGS)
    assert {m.gap_ratio == 1 for m in methods} == {False, True}
    assert {case.dtype for case in CASES.values()} == {"float32", "float16", "bfloat16"}
    for trial in trials:
        assert len(trial.widths) * 3 == trial.layout.num_rows
        if len(trial.widths) < 3 * len(HARD):  # the smallest chunk
            continue
        rows = trial.local.rows.astype(np.float32)
        assert np.isnan(rows).any() and np.isinf(rows).any()
        assert sorted(trial.local.places.order.reshape(-1)) == list(range(len(rows)))


def test_bytes_without_a_meaning_are_not_compared():
    trial = CASES[CASE].trial()
    base = np.asarray(trial.send(BASE))[1]
    _, _, supers = differences._sections(base, trial.layout, trial.widths)
    (lost, *_), (kept, *_) = np.flatnonzero(supers == 0x7FC0), np.flatnonzero(supers != 0x7FC0)
    for place, counts in ((lost, False), (kept, True)):
        ours = base.copy()
        ours[32 * place + 1] ^= 4  # a unit of the first plane
        found = differences.compare(ours, base, trial.layout, trial.widths)
        assert found.differing == counts
    assert base.size - 100 * 32 < found.compared < base.size


def test_steps_of_rounding_are_told_from_wrong_bytes():
    """A code or a scale by one step is a rounding; any other byte is not."""
    trial = CASES[CASE].trial()
    layout, widths = trial.layout, trial.widths
    base = np.asarray(trial.send(BASE))[1]
    codes, groups, supers = differences._sections(base, layout, widths)
    kept = np.flatnonzero((supers != 0x7FC0) & (supers > 0x2000) & (groups.min(axis=1) > 9))
    place = kept[-1]
    lane = np.flatnonzero((codes[place] > 0) & (codes[place] % 2 == 0))[0]
    plane_rows = [int(np.sum(widths > bit)) for bit in range(2)]
    byte = 32 * (plane_rows[0] + place) + lane % 32  # of bit 1: the lowest of the magnitude
    group = layout.group_scales_start + place * layout.groups
    super_scale = layout.super_scales_start + 2 * place
    by_one = {
        byte: np.uint8(1 << lane // 32),
        group: np.uint8(base[group] ^ (base[group] - 1)),
        super_scale: np.uint8(base[super_scale] ^ (base[super_scale] - 1)),
    }
    by_two = {at: np.uint8(base[at] ^ (base[at] - 2)) for at in (group, super_scale)}
    assert widths[place] > 2
    by_two[byte + 32 * plane_rows[1]] = by_one[byte]  # of the next bit
    unused = layout.group_scales_start - 1, len(base) - 1
    wrong = by_two | dict.fromkeys(unused, np.uint8(1))
    for changes, is_rounding in ((by_one, True), (wrong, False)):
        for at, bits in changes.items():
            ours = base.copy()
            ours[at] ^= bits
            found = differences.compare(ours, base, layout, widths)
            assert (found.differing, found.is_rounding) == (1, is_rounding)


@pytest.mark.parametrize("shape", [(3,), (3, 256)])
def test_results_that_hardware_may_flush_are_told_from_lost_ones(shape):
    """A zero in place of 2^-110 is a rounding, and one in place of 2^-109 is not."""
    trial = CASES[CASE].trial()
    for exponent, is_rounding in ((-110, True), (-109, False)):
        base = np.zeros(shape, np.float32)
        base[0] = 2.0**exponent
        found = differences.compare(np.zeros_like(base), base, trial.layout, trial.widths)
        assert found.is_rounding == is_rounding


@pytest.mark.parametrize(
    ("others", "verdict", "text"),
    [
        ((KernelVerdict.SAME, 5), KernelVerdict.SAME, ""),
        ((KernelVerdict.FAILED, 0), KernelVerdict.FAILED, "in process 1"),
        (
            (KernelVerdict.SAME, 6),
            KernelVerdict.DIFFERENT,
            "the bytes of this output differ between processes",
        ),
    ],
)
def test_the_verdict_of_all_processes_is_the_worst(others, verdict, text, monkeypatch):
    gathered = lambda ours, dtype: np.array([ours, others], dtype)  # noqa: E731
    monkeypatch.setattr(kernel_checks, "on_all_processes", gathered)
    (found,) = kernel_checks.worst_of_processes([HOP])
    assert (found.verdict, found.text) == (verdict, text)


# ------------------------------------------------------------------------------- the whole command


@pytest.mark.slow
def test_interpreted_kernels_on_this_cpu(tmp_path):
    path = tmp_path / "out.json"
    options = ("--interpret", "--backends", "xla", "triton", "--cases", CASE)
    # As users compile: without optimizations, JAX 0.12 rounds values that the base decodes by one
    # step otherwise than those of the interpreted kernel.
    as_users = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    done = command("verify", *options, "--cpu-devices", "2", "--json", str(path), **as_users)
    assert done.returncode == 0, done.stderr + done.stdout
    kept = json.loads(path.read_text())
    found = [c for c in kept["results"]["checks"] if c["backend"] == "triton"]
    had = ["absent" if BASE.derives(CALLS[c["operation"]]) else "same" for c in found]
    assert [c["verdict"] for c in found] == had and len(had) == len(CALLS)
    assert {"platform", "devices", "processes", "jax", "device"} <= {*kept["environment"]}
    assert kept["results"]["problems"] == []
