"""Program of a benchmark: from its options to its tables, its result file and its figure."""

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.signals import stopping_cleanly
from dynamiq_jax._console import program, tables

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Outcome of a benchmark."""

    results: Any = None  # numbers, texts and containers of them for the file; None for no file
    shown: Sequence[Any] = ()  # tables and lines for the terminal
    options: Mapping[str, Any] | None = None  # of the file; None for those of `files.options_of`
    draw: Callable[[], "Figure"] | None = None  # figure for a PNG file beside the result file
    status: int = 0  # of the program


def benchmark(
    name: str,
) -> Callable[[Callable[[Config], Report | Iterable[Report]]], Callable[[Config], int]]:
    """Make a function of options the whole benchmark, which prints and writes its report.

    Args:
      name: name of the file, if the options have no `output`; see `files.path_of`.

    Returns:
      A decorator. The function returns a report. A benchmark that takes long may yield reports
      instead: each is written to the file, and the last one is printed. Options with a field
      `save` that is False prevent files. The decorated function returns the exit status.
    """

    def decorate(main: Callable[[Config], Report | Iterable[Report]]) -> Callable[[Config], int]:
        @functools.wraps(main)
        def whole(config: Config) -> int:
            outcome, report, written = main(config), Report(), []
            for report in [outcome] if isinstance(outcome, Report) else outcome:
                written = _write(report, name, config) or written
            console = tables.console()
            for each in report.shown:
                console.print(each)
            if written:
                console.print(f"Written to {' and '.join(map(str, written))}", soft_wrap=True)
            return report.status

        return whole

    return decorate


def run(main: Callable[[Any], int | None], description: str | None) -> typing.NoReturn:
    """Parse the options of the process, run a benchmark, and exit with its status.

    Memory is kept between calls, for all that is measured alike.

    Args:
      main: function of a dataclass, which the annotation of its argument names. The fields of the
        dataclass are the options.
      description: text of the help: the docstring of the module.
    """
    (config_type, *_) = typing.get_type_hints(main).values()
    config = tyro.cli(config_type, description=description)
    dq.keep_memory()
    spec = typing.cast(Any, sys.modules["__main__"]).__spec__
    name = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    with stopping_cleanly(name):
        program.finish(name, lambda: main(config))


def _write(report: Report, name: str, config: Any) -> list[Path]:
    """Write the files of a report, and return their paths."""
    if report.results is None or not getattr(config, "save", True):
        return []
    options = files.options_of(config) if report.options is None else report.options
    path = getattr(config, "output", None) or files.path_of(name)
    written = [files.write(path, options, report.results)]
    if report.draw is not None:
        written.append(path.with_suffix(".png"))
        report.draw().savefig(written[-1], dpi=150)
    return written
