"""The command line: how settings, sizes and rates are written, what bench reports and keeps."""

import dataclasses
import importlib.util
import inspect
import json
import math
import os
import platform
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax import _commands as commands
from dynamiq_jax._commands import bench
from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.environment import environment
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import (
    format_rate,
    format_seconds,
    format_size,
    parse_bytes,
    parse_rate,
    parse_size,
)
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax._measurement import all_reduce
from dynamiq_jax._measurement.all_reduce import Measurement, measure
from dynamiq_jax._measurement.devices import make_mesh
from dynamiq_jax._measurement.gradients import worker_gradient
from dynamiq_jax._measurement.settings import parse_setting, parse_settings
from dynamiq_jax._prediction.break_even import break_even_rate, record
from dynamiq_jax._prediction.cost_model import CodecSpeed
from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS, kind_of
from dynamiq_jax.methods import METHODS
from dynamiq_jax.topologies import TOPOLOGIES
from tests.support.commands import command, on_two_processes, run_here, shown

SMALL = "dynamiq:6:widths=(4,8)"  # compiles in a third of the time of the default


# ---------------------------------------------------------------------------- settings


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_topology_can_be_written(method, topology):
    setting = parse_setting(f"{method}:{topology}")
    assert setting.method == METHODS[method]()
    assert setting.topology == TOPOLOGIES[topology]()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dinamiq:5", "is not known. Give a method .*'dynamiq'"),
        ("dynamiq:5:circle", "'circle' is not an option of dynamiq"),
        ("dynamiq:1", "bits=1 is out of range"),
        ("dynamiq:bit=5", "dynamiq has no field 'bit'.*'bits'"),
        ("psum:5", "is not known"),
        ("ef+psum", "is not known"),
        ("dynamiq:4:5", "gives 'bits' a second time"),
        ("dynamiq:ring:butterfly", "gives several topologies: .'ring', 'butterfly'.. Give one"),
        ("dynamiq:5:auto", "'auto' is not an option of dynamiq"),
        ("dynamiq:True", "'True' is not an option of dynamiq"),
        ("dynamiq:0x5", "'0x5' is not an option of dynamiq"),
        ("dynamiq:widths={[]}", r"widths='{\[\]}' is not a tuple"),
        ("exact:ring:unroll=x", "unroll='x' is not possible. Give True or False"),
        ("", "is not known"),
    ],
)
def test_a_wrong_setting_shows_what_is_possible(text, says):
    """The setting as it was written, what is wrong with a part, and what settings are."""
    with pytest.raises(CommandError) as error:
        parse_setting(text)
    shown = rf"{re.escape(f'--settings: {text!r}')}: .*{says}.* Settings are psum, or .*ring.*"
    assert re.fullmatch(shown, str(error.value)), error.value


@pytest.mark.parametrize("texts", [(), ("psum", "psum"), ("dynamiq:5", "dynamiq:bits=5.0:ring")])
def test_no_setting_is_measured_twice_or_not_at_all(texts):
    with pytest.raises(CommandError, match="--settings"):
        parse_settings(texts)


# ------------------------------------------------------------------------------- units


@example(16_100, "K", False)  # 16.1 * 1000 is 16100.000000000002 in binary
@settings(max_examples=200)
@given(st.integers(1, 10**12), st.sampled_from(("K", "M", "G", "B")), st.booleans())
def test_what_is_whole_in_decimals_is_a_size(size, unit, zeros):
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}[unit]
    digits = len(str(factor)) - 1
    text = f"{size // factor}.{size % factor:0{digits}}"
    assert parse_size((text if zeros else text.rstrip("0")) + unit) == size
    with pytest.raises(CommandError, match=r"--sizes: .* is not a whole number"):
        parse_size(f"{text}5{unit}")


def test_sizes_and_rates_are_read_or_refused_with_an_example():
    for text in ("", "8mi", "-1Mi", "0", "1.5", "Mi", "1.2.3K", ".", "8 M i"):
        with pytest.raises(CommandError, match=r"--sizes: .*8Mi"):
            parse_size(text)
    assert [parse_size(text) for text in ("8Mi", "2Ki", "4096")] == [2**23, 2048, 4096]
    rates = {"200mbit": 2e8, "1gbit": 1e9, "2.5Gbit": 2.5e9, ".5gbit": 5e8, "9600bit": 9600}
    assert {text: parse_rate(text) for text in rates} == rates
    for text in ("200", "200mb", "fast", "0mbit", "-1gbit"):
        with pytest.raises(CommandError, match=r"--rate: .*200mbit"):
            parse_rate(text)
    with pytest.raises(CommandError, match=r"'12\.5MB/s' is not a rate"):
        parse_rate("12.5MB/s")
    with pytest.raises(CommandError, match="--size: '512' is less than 1024"):
        parse_size("512", "--size", least=1024)
    sizes = {
        "4Ki": 4096,
        "4KiB": 4096,
        "4kB": 4000,
        "4KB": 4000,
        "4B": 4,
        "4": 4,
        "1.5MB": 1_500_000,
    }
    assert {text: parse_bytes(text, "--least") for text in sizes} == sizes
    with pytest.raises(CommandError, match="--least: '4Q' is not a number of bytes"):
        parse_bytes("4Q", "--least")


def test_numbers_are_shown_in_natural_units():
    assert [format_size(n) for n in (2**20, 3 * 2**10, 5000)] == ["1Mi", "3Ki", "5000"]
    assert [format_rate(r) for r in (2e8, 1e9, 56e3)] == ["200 Mbit/s", "1 Gbit/s", "56 kbit/s"]
    assert [format_bytes(b) for b in (4.1e12, 7e6, 512)] == ["4.1 TB", "7 MB", "512 B"]
    assert [format_seconds(s) for s in (2.0, 0.05, 1e-4)] == ["2 s", "50 ms", "100 us"]


# -------------------------------------------------------------------------- measurement


def test_measurements_say_what_was_asked(data_mesh):
    devices = data_mesh(2).devices.flat
    settings = parse_settings(["psum", "exact", "bf16"])
    steps = []
    results = measure(settings, make_mesh(list(devices)), 4096, repeats=3, done=steps.append)
    assert len(steps) == len(settings) * 4
    for result, setting in zip(results, settings, strict=True):
        assert (result.setting, result.size, result.workers) == (setting.name, 4096, 2)
        assert len(result.repeats) == 3 and result.seconds == sorted(result.repeats)[1] > 0
        assert result.bytes_per_worker == setting.wire_report(4096, 2).bytes_per_worker
        assert result.replicas_equal
        assert record(result, [], None, 1)["bandwidth"] == pytest.approx(4 * 4096 / result.seconds)
    assert [result.bits for result in results] == [32, 32, 16]
    assert max(result.vnmse for result in results[:2]) < 1e-13
    # Two roundings to 8 bits of precision, each with a relative variance of about 2^-19.
    assert 1e-6 < results[2].vnmse < 1e-5


def test_gradients_are_those_that_the_exact_sum_is_of(data_mesh):
    mesh = make_mesh(list(data_mesh(4).devices.flat))
    gradients = all_reduce.make_gradients(mesh, 1000, seed=3)
    total = np.asarray(gradients, np.float64).sum(axis=0)
    np.testing.assert_allclose(total, all_reduce.exact_sum(4, 1000, seed=3), rtol=0, atol=1e-12)
    assert not np.array_equal(gradients[0], gradients[1])


def test_magnitudes_of_rows_spread_by_two_and_a_half_octaves():
    """As the pages say of made-up gradients."""
    drawn = worker_gradient(0, 2**19, seed=0)
    sizes = np.log2(np.linalg.norm(drawn.reshape(-1, 256), axis=1))
    assert np.std(sizes) == pytest.approx(2.5, rel=0.05)


def result(setting: str, seconds: float, sent: int, **changes) -> Measurement:
    made = Measurement(
        setting=setting,
        size=1024,
        workers=4,
        seconds=seconds,
        repeats=(seconds,),
        bytes_per_worker=sent,
        bits=5.0,
        vnmse=1e-3,
        replicas_equal=True,
    )
    return dataclasses.replace(made, **changes)


def test_break_even_is_where_both_take_the_same_time():
    rate = break_even_rate(0.03, 10**6, 0.01, 6 * 10**6)
    assert 0.03 + 8e6 / rate == pytest.approx(0.01 + 48e6 / rate)
    assert break_even_rate(0.01, 1, 0.02, 2) == math.inf  # faster and smaller
    assert break_even_rate(0.01, 2, 0.02, 1) == 0  # sends more
    assert break_even_rate(0.02, 1, 0.01, 1) == 0


def test_baselines_are_those_of_the_same_size_however_they_are_written():
    results = [
        result(name, seconds, sent, size=size)
        for size in (1024, 2048)
        for name, seconds, sent in (("bf16", 0.01, 16 * size), ("dynamiq:5", 0.03, 5 * size))
    ]
    rows = [record(each, results, None, 1) for each in results]
    assert [row["break_even"] for row in rows[::2]] == [{}, {}]  # no baseline of its own
    small, large = (row["break_even"]["bf16:ring"] for row in rows[1::2])
    assert large == 2 * small == pytest.approx(8 * 11 * 2048 / 0.02)


def test_a_known_link_does_not_count_as_codec_time():
    results = [result("psum", 0.05, 10**6), result("dynamiq:5", 0.03, 10**5)]
    free = record(results[1], results, None, 1)
    assert free["codec_seconds"] == 0.03 and free["break_even"] == {"psum": math.inf}
    linked = record(results[1], results, 1e9, 1)
    assert linked["codec_seconds"] == pytest.approx(0.03 - 8e5 / 1e9)


@pytest.mark.parametrize(("link", "sharing"), ((None, 1), (None, 4), (1e9, 1), (1e9, 4)))
def test_codec_ns_is_what_the_cost_model_calls_it(link, sharing):
    """Of one worker: those that share the cores of a machine take as many times that."""
    row = record(result("dynamiq:5", 0.03, 10**5), [], link, sharing)
    speed = CodecSpeed(ns_per_coordinate=row["codec_ns"])
    assert sharing * speed.seconds(row["size"], 9) == pytest.approx(row["codec_seconds"])


def test_the_command_that_goes_on_is_that_of_the_largest_size():
    made = [
        result(name, seconds, 10**5, size=size)
        for size in (1024, 4096)
        for name, seconds in (("psum", 1e-3), ("dynamiq:8:ring", 3e-3), ("dynamiq:6", 2.048e-3))
    ]
    rows = [record(each, made, None, 4) for each in made]
    text = bench.to_advise(rows, "cpu", with_wire=False)
    assert text.endswith("\ndynamiq-jax advise --device cpu --codec-ns 125")
    assert "dynamiq:6 with 4Ki coordinates" in text and "--link takes it out" not in text
    assert "--link takes it out" in bench.to_advise(rows, "gpu", with_wire=True)
    assert bench.to_advise(rows[:1], "cpu", with_wire=False) is None


@pytest.mark.parametrize(
    ("platform", "name", "kind"),
    (
        ("cpu", "cpu", "cpu"),
        ("gpu", "NVIDIA H200", "gpu"),
        ("tpu", "TPU v5 lite", "tpu_v5e"),
        ("tpu", "TPU v5", "tpu_v5p"),
        ("tpu", "TPU v6 lite", "tpu_v6e"),
    ),
)
def test_the_advice_is_for_the_device_that_was_timed(platform, name, kind):
    assert kind_of(platform, name) == kind and kind in CODEC_SPEEDS


# ------------------------------------------------------------------- tables and records


def test_the_table_names_break_even_speeds():
    results = [result("psum", 0.01, 6 * 10**6), result("dynamiq:5", 0.03, 10**6)]
    text = shown(bench.bench_table([record(r, results, None, 4) for r in results]))
    assert "2 Gbit/s" in text and "dynamiq:5" in text and "30 ms" in text and "1Ki" in text
    assert "codec ns" in text and "7324" in text  # 30 ms, 1024 coordinates, 4 workers


def test_unequal_replicas_are_an_error(capsys):
    rows = [dataclasses.asdict(result("dynamiq:5", 1.0, 1, replicas_equal=False))]
    assert tables.warn_unequal(tables.console(), rows) == 1
    assert "dynamiq:5: workers do not hold the same bits" in capsys.readouterr().out
    assert tables.warn_unequal(tables.console(), []) == 0


def test_records_hold_environment_and_no_infinity(tmp_path):
    path = tmp_path / "out.json"
    rows = [{"break_even": {"psum": math.inf}, "off": (math.nan, 1.0)}]
    records.write(path, environment("cpu"), {"repeats": 1}, rows)
    kept = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert kept["results"] == [{"break_even": {"psum": None}, "off": [None, 1.0]}]
    assert kept["config"] == {"repeats": 1}
    known = {"date", "jax", "jaxlib", "python", "cpu", "cores", "device", "dynamiq_jax"}
    assert known <= kept["environment"].keys()


def test_the_cpu_has_the_name_that_the_system_gives_it():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    assert environment("cpu")["cpu"] in (names or [platform.processor(), platform.machine()])


def test_outputs_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "mine")
    (tmp_path / "mine").mkdir()
    for json_name, plot_name, says in (
        ("missing/out.json", None, r"--json is .*no folder"),
        ("", None, r"--json is .*this is a folder\. Give a file in it"),
        ("mine/out.json", None, r"--json is .*this user cannot write it\."),
        (None, "out.txt", r"--plot is .*\.png"),
    ):
        names = json_name, plot_name
        with pytest.raises(CommandError, match=says):
            options.check_outputs(*(None if name is None else tmp_path / name for name in names))


# ------------------------------------------------------------------------- the command


def test_bench_runs_from_the_command_line(tmp_path, monkeypatch):
    json_path = tmp_path / "out.json"
    small = ("--cpu-devices", "2", "--sizes", "4Ki", "8Ki", "--repeats", "2")
    settings = ("--settings", "psum", "exact", SMALL)
    done = command("bench", *small, *settings, "--json", str(json_path))
    assert done.returncode == 0, done.stderr
    assert "8Ki float32 coordinates, 2 workers" in done.stdout and SMALL in done.stdout
    kept = json.loads(json_path.read_text())
    assert kept["config"]["repeats"] == 2
    assert [(row["setting"], row["size"]) for row in kept["results"]] == [
        (name, size) for size in (4096, 8192) for name in ("psum", "exact", SMALL)
    ]
    for row in kept["results"]:
        assert row["workers"] == 2 and row["replicas_equal"] and len(row["repeats"]) == 2
        assert ("psum" in row["break_even"]) == (row["setting"] != "psum")
        assert 2e-9 * row["codec_ns"] * row["size"] == pytest.approx(row["seconds"])
    name, *pasted = done.stdout.splitlines()[-1].split()
    assert name == "dynamiq-jax" and pasted[:2] == ["advise", "--device"]
    assert float(pasted[-1]) == pytest.approx(kept["results"][-1]["codec_ns"], rel=0.01)
    assert run_here(monkeypatch, *pasted) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench --settings nonsense", "'nonsense' is not known"),
        ("bench --sizes 8Q", "'8Q' is not a number of coordinates"),
        ("bench --repeats 0", "--repeats is 0: give at least 1"),
        ("bench --cpu-devices 0", "--cpu-devices is 0: give at least 1"),
        ("bench --process-id 1", "no --coordinator"),
        ("bench --coordinator localhost:1 --process-id 1", "--num-processes is None"),
        ("bench --coordinator a --num-processes 2 --process-id 0", "give the HOST:PORT"),
        ("bench --sizes 10", "'10' is less than 1024"),
    ],
)
def test_mistakes_end_in_one_line(arguments, says, monkeypatch):
    ended = run_here(monkeypatch, *arguments.split())
    assert re.match(f"dynamiq-jax: .*{says}", ended) and "\n" not in ended, ended


@pytest.mark.slow
def test_bench_runs_over_several_processes(tmp_path):
    small = ("--sizes", "4Ki", "--repeats", "2", "--settings", "psum", "bf16")
    first, second, kept = on_two_processes(tmp_path / "out.json", "bench", *small)
    assert "4Ki float32 coordinates, 2 workers" in first
    assert "4Ki" not in second  # the first one reports
    rows = kept["results"]
    assert [row["workers"] for row in rows] == [2, 2]
    for row in rows:  # both processes are on this machine
        assert 2e-9 * row["codec_ns"] * row["size"] == pytest.approx(row["seconds"])


def test_one_device_has_nothing_to_exchange(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax, "devices", lambda: devices[:1])
    with pytest.raises(CommandError, match=r"nothing to exchange.*--cpu-devices 8"):
        bench.Bench(cpu_devices=1).devices(least=2)


def test_help_of_all_commands_fits_a_screen_and_that_of_one_says_everything(monkeypatch, capsys):
    assert run_here(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"dynamiq-jax {dq.__version__}\n"
    assert run_here(monkeypatch, "--help") == 0
    shown_at_once = capsys.readouterr().out
    assert shown_at_once.count("\n") < 40
    assert "examples:" in shown_at_once and "advise --link 25gbit" in shown_at_once
    text = " ".join(shown_at_once.replace("│", " ").split())
    for name, command_ in commands._commands().items():
        first, *others = inspect.getdoc(command_).split("\n\n")
        assert first in text
        assert run_here(monkeypatch, name, "--help") == 0
        of_one = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for paragraph in (first, *others):
            words = " ".join(paragraph.split())
            assert words in of_one
            assert paragraph is first or words not in text


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "rich" or None)
    ended = run_here(monkeypatch, "bench")
    assert ended.startswith("dynamiq-jax: rich not installed.")
    assert "pip install 'dynamiq-jax[cli]', or in a checkout: pip install '.[cli]'" in ended
