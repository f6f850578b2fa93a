"""The command line: how settings, sizes and rates are written, what bench reports and keeps."""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

import dynamiq_jax as dq
from dynamiq_jax import cli
from dynamiq_jax._commands import bench, measure, tables
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.measure import Measurement
from dynamiq_jax._workshop.settings import DEFAULTS, parse_setting, parse_settings
from dynamiq_jax._workshop.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_size,
    parse_rate,
    parse_size,
)
from dynamiq_jax.methods import METHODS
from dynamiq_jax.topologies import TOPOLOGIES, CodecSpeed, Ring
from tests.support.commands import command, shown

ROOT = pathlib.Path(__file__).parents[1]
SMALL = "dynamiq:6:widths=(4,8)"  # compiles in a third of the time of the default


# ---------------------------------------------------------------------------- settings


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_topology_can_be_written(method, topology):
    setting = parse_setting(f"{method}:{topology}")
    assert setting.method == METHODS[method]()
    assert setting.topology == TOPOLOGIES[topology]()


def test_options_reach_method_and_topology():
    setting = parse_setting("dynamiq:4.5:ring:rounding=independent:bidirectional=True")
    assert (setting.method.bits, setting.method.rounding) == (4.5, "independent")
    assert setting.topology == Ring(bidirectional=True)


def test_defaults_are_possible_and_compare_with_both_baselines():
    assert [setting.name for setting in parse_settings(DEFAULTS)] == list(DEFAULTS)
    assert {"psum", "bf16:ring"} <= set(DEFAULTS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dinamiq:5", "no method 'dinamiq'.*METHOD.*dynamiq"),
        ("dynamiq:5:circle", "'circle' is no topology.*ring"),
        ("dynamiq:1", "bits=1.0 is out of range"),
        ("exact:5", "neither exact nor ring has 'bits'"),
        ("dynamiq:bit=5", "neither dynamiq nor ring has 'bit'.*'bits'"),
        ("psum:5", "psum takes no options"),
        ("ef+psum", "psum takes no error feedback.*'psum'"),
        ("dynamiq:4:5", "'5' gives 'bits' a second time"),
        ("dynamiq:bits=4:bits=5", "'bits=5' gives 'bits' a second time"),
        ("dynamiq:ring:butterfly", "'ring', 'butterfly'.*several topologies"),
        ("dynamiq:True", "'True' is no topology, number or FIELD=VALUE"),
        ("dynamiq:0x5", "'0x5' is no topology, number or FIELD=VALUE"),
        ("dynamiq:nan", "bits=nan is out of range"),
        ("dynamiq:widths={[]}", r"widths='{\[\]}' is not a tuple"),
        ("dynamiq:centre=x", "centre='x' is not possible. Give True or False"),
        ("dynamiq:auto:network=5", "network=5 is not a network"),
        ("dynamiq:auto:codec=5", "codec=5 is not a speed"),
        ("exact:ring:unroll=x", "unroll='x' is not possible. Give True or False"),
        ("exact:bidirectional=1", "bidirectional=1 is not possible. Give True or False"),
        ("", "no method ''"),
    ],
)
def test_a_wrong_setting_shows_what_is_possible(text, says):
    with pytest.raises(CommandError, match="--settings.*" + says):
        parse_setting(text)


@pytest.mark.parametrize("texts", [(), ("psum", "psum"), ("dynamiq:5", "dynamiq:bits=5.0:ring")])
def test_no_setting_is_measured_twice_or_not_at_all(texts):
    with pytest.raises(CommandError, match="--settings"):
        parse_settings(texts)


def test_a_topology_that_chooses_is_not_measured():
    with pytest.raises(CommandError, match=r"'dynamiq:5:auto'.*advise"):
        parse_settings(["psum", "dynamiq:5:auto"])


def test_bytes_are_those_of_the_method():
    size, workers = 2**20, 4
    assert parse_setting("psum").wire_report(size, workers).bytes_per_worker == 6 * size
    assert parse_setting("exact").wire_report(size, workers).bytes_per_worker == 6 * size
    assert parse_setting("dynamiq:5").wire_report(size, workers).bits == pytest.approx(5, abs=0.01)


# ------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "size"), [("8Mi", 2**23), ("1.5M", 1_500_000), ("4096", 4096), ("2Ki", 2048)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@example(16_100, "K", False)  # 16.1 * 1000 is 16100.000000000002 in binary
@settings(max_examples=200)
@given(st.integers(1, 10**12), st.sampled_from(("K", "M", "G")), st.booleans())
def test_what_is_whole_in_decimals_is_a_size(size, unit, zeros):
    factor = {"K": 10**3, "M": 10**6, "G": 10**9}[unit]
    digits = len(str(factor)) - 1
    text = f"{size // factor}.{size % factor:0{digits}}"
    assert parse_size((text if zeros else text.rstrip("0")) + unit) == size
    with pytest.raises(CommandError, match=r"--sizes: .* is not a whole number"):
        parse_size(f"{text}5{unit}")


@pytest.mark.parametrize("text", ["", "8mi", "-1Mi", "0", "1.5", "Mi", "1.2.3K", "8 M i"])
def test_wrong_sizes(text):
    with pytest.raises(CommandError, match=r"--sizes: .*8Mi"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 2e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("9600bit", 9600)]
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["200", "200mb", "fast", "0mbit", "-1gbit"])
def test_wrong_rates(text):
    with pytest.raises(CommandError, match=r"--rate: .*200mbit"):
        parse_rate(text)


def test_numbers_are_shown_in_natural_units():
    assert [format_size(n) for n in (2**20, 3 * 2**10, 5000)] == ["1Mi", "3Ki", "5000"]
    assert [format_rate(r) for r in (2e8, 1e9, 56e3)] == ["200 Mbit/s", "1 Gbit/s", "56 kbit/s"]
    assert [format_bytes(b) for b in (7e6, 512)] == ["7 MB", "512 B"]
    assert [format_seconds(s) for s in (2.0, 0.05, 1e-4)] == ["2 s", "50 ms", "100 us"]


# -------------------------------------------------------------------------- measurement


def test_measurements_say_what_was_asked(data_mesh):
    devices = data_mesh(2).devices.flat
    settings = parse_settings(["psum", "exact", SMALL])
    steps = []
    results = measure.measure(
        settings, measure.make_mesh(list(devices)), 4096, repeats=3, seed=0, done=steps.append
    )
    assert len(steps) == len(settings) * 4
    for result, setting in zip(results, settings, strict=True):
        assert (result.setting, result.size, result.workers) == (setting.name, 4096, 2)
        assert len(result.repeats) == 3 and result.seconds == sorted(result.repeats)[1] > 0
        assert result.bytes_per_worker == setting.wire_report(4096, 2).bytes_per_worker
        assert result.replicas_equal
        assert result.bandwidth == pytest.approx(4 * 4096 / result.seconds)
    assert [result.bits for result in results[:2]] == [32, 32]
    assert max(result.vnmse for result in results[:2]) < 1e-13
    assert 1e-7 < results[2].vnmse < 1e-1


def test_gradients_are_those_that_the_exact_sum_is_of(data_mesh):
    mesh = measure.make_mesh(list(data_mesh(4).devices.flat))
    gradients = measure.make_gradients(mesh, 1000, seed=3)
    total = np.asarray(gradients, np.float64).sum(axis=0)
    np.testing.assert_allclose(total, measure.exact_sum(4, 1000, seed=3), rtol=0, atol=1e-12)
    assert not np.array_equal(gradients[0], gradients[1])


def result(setting: str, seconds: float, sent: int, **changes) -> Measurement:
    made = Measurement(setting, 1024, 4, seconds, (seconds,), sent, 5.0, 1e-3, True)
    return dataclasses.replace(made, **changes)


def test_break_even_is_where_both_take_the_same_time():
    rate = bench.break_even_rate(0.03, 10**6, 0.01, 6 * 10**6)
    assert 0.03 + 8e6 / rate == pytest.approx(0.01 + 48e6 / rate)
    assert bench.break_even_rate(0.01, 1, 0.02, 2) == math.inf  # faster and smaller
    assert bench.break_even_rate(0.01, 2, 0.02, 1) == 0  # sends more
    assert bench.break_even_rate(0.02, 1, 0.01, 1) == 0


def test_a_known_link_does_not_count_as_codec_time():
    results = [result("psum", 0.05, 10**6), result("dynamiq:5", 0.03, 10**5)]
    free = bench.record(results[1], results, None, 1)
    assert free["codec_seconds"] == 0.03 and free["break_even"] == {"psum": math.inf}
    linked = bench.record(results[1], results, 1e9, 1)
    assert linked["codec_seconds"] == pytest.approx(0.03 - 8e5 / 1e9)


@pytest.mark.parametrize(("link", "sharing"), ((None, 1), (None, 4), (1e9, 1), (1e9, 4)))
def test_codec_ns_is_what_the_cost_model_calls_it(link, sharing):
    """Of one worker: those that share the cores of a machine take as many times that."""
    row = bench.record(result("dynamiq:5", 0.03, 10**5), [], link, sharing)
    speed = CodecSpeed(ns_per_coordinate=row["codec_ns"])
    assert sharing * speed.seconds(row["size"], 9) == pytest.approx(row["codec_seconds"])


def test_workers_on_cpus_share_a_machine(data_mesh):
    assert measure.workers_per_machine(data_mesh(4)) == 4


def test_the_command_that_goes_on_is_that_of_the_largest_size():
    made = [
        result(name, seconds, 10**5, size=size)
        for size in (1024, 4096)
        for name, seconds in (("psum", 1e-3), ("dynamiq:8:ring", 3e-3), ("dynamiq:6", 2.048e-3))
    ]
    rows = [bench.record(each, made, None, 4) for each in made]
    text = bench.to_advise(rows, "cpu", with_wire=False)
    assert text.endswith("\ndynamiq-jax advise --device cpu --codec-ns 125")
    assert "dynamiq:6 with 4Ki coordinates" in text and "--link takes it out" not in text
    assert "--link takes it out" in bench.to_advise(rows, "gpu", with_wire=True)
    assert bench.to_advise(rows[:1], "cpu", with_wire=False) is None


# ------------------------------------------------------------------- tables and records


def test_the_table_names_break_even_speeds():
    results = [result("psum", 0.01, 6 * 10**6), result("dynamiq:5", 0.03, 10**6)]
    text = shown(bench.bench_table([bench.record(r, results, None, 4) for r in results]))
    assert "2 Gbit/s" in text and "dynamiq:5" in text and "30 ms" in text and "1Ki" in text
    assert "codec ns" in text and "7324" in text  # 30 ms, 1024 coordinates, 4 workers


def test_unequal_replicas_are_an_error():
    rows = [dataclasses.asdict(result("dynamiq:5", 1.0, 1, replicas_equal=False))]
    console = Console(width=160)
    with console.capture() as capture:
        assert tables.warn_unequal(console, rows) == 1
    assert "dynamiq:5: workers do not hold the same bits" in capture.get()
    assert tables.warn_unequal(console, []) == 0


def test_records_hold_environment_and_no_infinity(tmp_path):
    path = tmp_path / "out.json"
    tables.save_json(path, "cpu", {"repeats": 1}, [{"break_even": {"psum": math.inf}}])
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert record["results"] == [{"break_even": {"psum": None}}]
    assert record["config"] == {"repeats": 1}
    assert {"date", "jax", "jaxlib", "python", "cpu", "cores", "device", "dynamiq_jax"} <= set(
        record["environment"]
    )


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots(tmp_path, suffix):
    path = tmp_path / f"out.{suffix}"
    tables.save_plot(path, "time", {"1Mi": {"psum": 1.0, "dynamiq:5": 0.2}, "8Mi": {"psum": 2.0}})
    assert path.stat().st_size > 1000


def test_outputs_are_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(CommandError, match=r"--json is .*no folder"):
        tables.check_outputs(tmp_path / "missing" / "out.json", None)
    with pytest.raises(CommandError, match=r"--plot is .*\.png"):
        tables.check_outputs(None, tmp_path / "out.txt")


# ------------------------------------------------------------------------- the command


def test_bench_runs_from_the_command_line(tmp_path):
    json_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--cpu-devices", "2", "--sizes", "4Ki", "8Ki", "--repeats", "2"]
    done = command(
        "bench",
        *options,
        "--settings",
        "psum",
        "exact",
        SMALL,
        "--json",
        str(json_path),
        "--plot",
        str(plot_path),
    )
    assert done.returncode == 0, done.stderr
    assert "8Ki float32 coordinates, 2 workers" in done.stdout and SMALL in done.stdout
    record = json.loads(json_path.read_text())
    assert record["config"]["repeats"] == 2
    assert [(row["setting"], row["size"]) for row in record["results"]] == [
        (name, size) for size in (4096, 8192) for name in ("psum", "exact", SMALL)
    ]
    for row in record["results"]:
        assert row["workers"] == 2 and row["replicas_equal"] and len(row["repeats"]) == 2
        assert ("psum" in row["break_even"]) == (row["setting"] != "psum")
        assert 2e-9 * row["codec_ns"] * row["size"] == pytest.approx(row["seconds"])
    assert plot_path.stat().st_size > 1000

    name, *pasted = done.stdout.splitlines()[-1].split()
    assert name == "dynamiq-jax" and pasted[:2] == ["advise", "--device"]
    assert float(pasted[-1]) == pytest.approx(record["results"][-1]["codec_ns"], rel=0.01)
    advised = command(*pasted)
    assert advised.returncode == 0, advised.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench --settings nonsense", "no method 'nonsense'"),
        ("bench --sizes 8Q", "'8Q' is not a number of coordinates"),
        ("bench --repeats 0", "--repeats is 0: give at least 1"),
        ("bench --cpu-devices 0", "--cpu-devices is 0: give at least 1"),
        ("bench --seed -1", "--seed is -1: give 0 to 2147483647"),
        ("bench --seed 4294967296", "--seed is 4294967296: give 0 to 2147483647"),
        ("bench --process-id 1", "no --coordinator"),
        ("bench --coordinator localhost:1 --process-id 1", "--num-processes is None"),
        ("network --hosts 1", "--hosts: 1: give 2 to 250"),
        ("network --rate quick", "'quick' is not a rate"),
        ("network --timeout 0", "--timeout is 0.0: give at least 1"),
        ("network --seed -1", "--seed is -1: give 0 to 2147483647"),
        ("network --hosts 3 --settings bf16:butterfly", "butterfly.*3 workers.*such as 2 or 4"),
    ],
)
def test_mistakes_end_in_one_line(arguments, says, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dynamiq-jax", *arguments.split()])
    with pytest.raises(SystemExit, match=says) as ended:
        cli.main()
    assert str(ended.value).startswith("dynamiq-jax: ") and "\n" not in str(ended.value)


def test_bench_runs_over_several_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    path = tmp_path / "out.json"
    join = ("--coordinator", coordinator, "--num-processes", "2", "--process-id")
    options = ("--sizes", "4Ki", "--repeats", "2", "--settings", "psum", SMALL)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(command, "bench", *options, *join, str(rank), "--json", str(path))
            for rank in range(2)
        ]
        first, second = (run.result() for run in runs)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "4Ki float32 coordinates, 2 workers" in first.stdout
    assert "4Ki" not in second.stdout  # the first one reports
    rows = json.loads(path.read_text())["results"]
    assert [row["workers"] for row in rows] == [2, 2]
    for row in rows:  # both processes are on this machine
        assert 2e-9 * row["codec_ns"] * row["size"] == pytest.approx(row["seconds"])


def test_one_device_has_nothing_to_exchange():
    done = command("bench", "--cpu-devices", "1")
    assert done.returncode == 1
    assert re.fullmatch("dynamiq-jax: .*nothing to exchange.*--cpu-devices 8.*\n", done.stderr)


def test_the_version():
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"dynamiq-jax {dq.__version__}\n")


def test_help_teaches():
    done = command("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout and "network" in done.stdout and "--hosts 4" in done.stdout


def test_missing_packages_are_named():
    code = (
        "import sys; sys.modules['rich'] = None; import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'rich' else find(name, *rest)\n"
        "from dynamiq_jax._commands import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dynamiq-jax: rich not installed.")
    assert "pip install 'dynamiq-jax[cli]'" in done.stderr


def test_the_library_needs_none_of_it():
    code = (
        "import sys, dynamiq_jax as dq\n"
        "[getattr(dq, name) for name in dq.__all__]\n"
        "assert not {'tyro', 'rich', 'matplotlib', 'dynamiq_jax._commands'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
