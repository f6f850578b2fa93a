"""What all benchmarks share: reports and their files, tables, times in turns, and processes."""

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.harness import command, files, timing
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark
from benchmarks.harness.processes import in_process
from benchmarks.harness.signals import stopping_cleanly
from benchmarks.training.every_run import train_every


@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""

    size: int = 3
    save: bool = True
    output: Path | None = None


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Folder of the result files."""
    monkeypatch.setattr(files, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_a_report_is_printed_and_written_with_the_options_of_its_run(results, capsys):
    @benchmark("trial")
    def main(config: Config) -> Report:
        return Report(results=[config.size], shown=["a line"], draw=Figure, status=1)

    assert main(Config(size=5)) == 1
    written = json.loads((results / "trial.json").read_text())
    assert written["config"] == {"size": 5, "save": True}
    assert written["results"] == [5]
    assert {"date", "jax", "commit", "device"} <= written["environment"].keys()
    assert (results / "trial.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "a line" in printed and "trial.json" in printed


def test_options_choose_the_file_or_none(results, tmp_path):
    @benchmark("trial")
    def main(config: Config) -> Report:
        return Report(results=[], options={"size": "all"})

    assert main(Config(save=False)) == 0
    assert not results.exists()
    main(Config(output=tmp_path / "other.json"))
    assert json.loads((tmp_path / "other.json").read_text())["config"] == {"size": "all"}
    assert not results.exists()


def test_each_report_of_a_long_run_is_written_and_the_last_one_printed(results, capsys):
    seen = []

    @benchmark("trial")
    def main(config: Config) -> Iterator[Report]:
        yield Report(results=[1], shown=["first"])
        seen.append(json.loads((results / "trial.json").read_text())["results"])
        yield Report(shown=["last"])

    main(Config())
    assert seen == [[1]]
    printed = capsys.readouterr().out
    assert "last" in printed and "trial.json" in printed and "first" not in printed


def test_earlier_results_are_those_of_the_same_options(results):
    path = files.write(files.path_of("trial"), {"size": (1, 2), "save": True}, ["row"])
    assert files.earlier_results(path, {"size": [1, 2], "save": False}, but=("save",)) == ["row"]
    assert files.earlier_results(path, {"size": [1, 3], "save": True}, but=("save",)) is None
    assert files.earlier_results(files.path_of("none"), {}, but=()) is None


def test_columns_take_keys_paths_and_functions():
    rows = [{"name": "a", "of": {"x": 1.0}}, {"name": "b", "of": {"x": 2.5}}]
    columns = (
        Column("name", "name"),
        Column("x", ("of", "x"), "{:.2f} s"),
        Column("large", lambda row: row["of"]["x"] if row["of"]["x"] > 2 else None, "{:g}"),
    )
    made = table("title", columns, rows)
    cells = [list(column.cells) for column in made.columns]
    assert cells == [["a", "b"], ["1.00 s", "2.50 s"], ["", "2.5"]]
    assert [column.justify for column in made.columns] == ["left", "right", "right"]
    with pytest.raises(KeyError, match="other"):
        table("title", [Column("x", ("of", "other"))], rows)


def test_calls_take_turns_after_a_first_one_that_is_not_timed():
    called = []
    seconds = timing.in_turns({name: lambda name=name: called.append(name) for name in "ab"}, 3)
    assert called == list("abababab")
    assert {name: len(of) for name, of in seconds.items()} == {"a": 3, "b": 3}
    assert timing.median_ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0


def test_runs_that_are_known_are_not_trained_again():
    """Unless the first one, which may be trained in any case, has other results."""
    trained = []

    def make(run):
        return lambda seed: trained.append((run, seed)) or f"{run}{seed}"

    def results(known, **options):
        trained.clear()
        return dict(train_every("abc", (0, 1), make, known, **options))

    expected = {run: [f"{run}0", f"{run}1"] for run in "abc"}
    known = {"a": ["a0", "a1"], "b": ["b0"]}
    for first_again, first in ((False, []), (True, [("a", 0), ("a", 1)])):
        assert results(known, first_again=first_again) == expected
        assert trained == [*first, ("b", 1), ("c", 0), ("c", 1)]
    assert known == {"a": ["a0", "a1"], "b": ["b0"]}
    assert results({**known, "a": ["other"]}, first_again=True) == expected
    assert len(trained) == 6


def in_other_process(values: list[int], name: str) -> dict[str, object]:
    """A function that another process calls."""
    print("not the result")
    if name == "fails":
        raise ValueError("no such name")
    return {"sum": sum(values), "variable": os.environ.get(name), "process": os.getpid()}


@pytest.mark.slow
def test_a_call_in_a_process_of_its_own_has_arguments_variables_and_errors():
    result = in_process(in_other_process, (1, 2), "TRIAL", environment={"TRIAL": "yes"})
    assert result["process"] != os.getpid()
    assert (result["sum"], result["variable"]) == (3, "yes")
    with pytest.raises(RuntimeError, match=r"(?s)in_other_process.*no such name"):
        in_process(in_other_process, [], "fails")


def test_the_annotation_of_a_benchmark_names_its_options(monkeypatch):
    @benchmark("trial")
    def main(config: Config) -> Report:
        return Report(status=config.size)

    monkeypatch.setattr("sys.argv", ["trial", "--size", "4", "--no-save"])
    with pytest.raises(SystemExit) as ended:
        command.run(main, "Text of the help.")
    assert ended.value.code == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_once(number, capsys):
    """What removes the traces of a benchmark is not interrupted by more of them."""
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, stopping_cleanly("name", "; all is removed"):
        try:
            signal.raise_signal(number)
        finally:
            for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(again)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == f"name: stopped by {number.name}; all is removed.\n"
    assert signal.getsignal(number) == before
