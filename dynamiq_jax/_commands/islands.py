"""`dynamiq-jax islands`: rounds of a run of islands, from its store."""

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro
from rich.table import Table

from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.environment import environment
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_seconds
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax.islands import ObjectStore, RoundRecord, SharedFolder, Transport, history

_PATIENCE = 10.0  # seconds for a store that does not answer: somebody waits for the table


@dataclasses.dataclass(frozen=True)
class ShowIslands:
    """Show who takes part in a run of islands, what they sent, and who was left out and why.

    RUN is the folder that they share, or the URL of an object store, which needs fsspec and the
    package of the store:

      dynamiq-jax islands /shared/run-1
      dynamiq-jax islands s3://bucket/run-1 --last 20 --plot losses.png

    Nothing is written to the store.
    """

    store: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL."""

    last: int = 10
    """Rounds from the end."""

    secret: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File with the secret of the islands, if they sign what they write."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw the losses that the islands told."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the rounds to this file."""

    def run(self) -> int:
        """Print the rounds; return the exit status."""
        options.check_range("--last", self.last, 1)
        options.check_outputs(self.json, self.plot)
        try:
            secret = None if self.secret is None else self.secret.read_bytes()
        except OSError as error:
            raise CommandError(f"--secret is {self.secret}: {error.strerror}.") from None
        transport = transport_of(self.store)
        try:
            rounds = history(transport, secret, self.last)
        except ValueError as error:
            raise CommandError(f"{self.store}: {error}") from None
        except Exception as error:  # of the package of the store, in any kind
            raise CommandError(f"{self.store} cannot be read: {error!r:.200}") from None
        console = tables.console()
        console.print(_table(rounds))
        for each in rounds:
            left_out = {} if each.decision is None else each.decision.left_out
            for name, reason in left_out.items():
                console.out(f"round {each.number}: {name} is left out: {reason}")
            if each.problem:
                console.out(f"round {each.number}: {each.problem}")
        if self.json is not None:
            rows = [_row(each) for each in rounds]
            records.write(self.json, environment("cpu"), {"store": self.store}, rows)
        if self.plot is not None:
            _draw(self.plot, rounds)
        return 0


def transport_of(store: str) -> Transport:
    """Return the transport of a folder or a URL.

    Raises:
      CommandError: no such folder, or a URL of a package that is not installed.
    """
    if "://" not in store:
        if not Path(store).is_dir():
            raise CommandError(f"{store} is no folder. Give that of a run, or a URL.")
        return SharedFolder(store)
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(store)
    except (ImportError, ValueError) as error:
        raise CommandError(
            f"{store}: {error}. Install fsspec and the package of the store."
        ) from None
    return ObjectStore(filesystem, path, patience=_PATIENCE)


def _row(each: RoundRecord) -> dict[str, Any]:
    decision = each.decision
    return {
        "round": each.number,
        "here": list(each.here),
        "counted": None if decision is None else list(decision.members),
        "left_out": {} if decision is None else dict(decision.left_out),
        **each.notes._asdict(),
    }


def _table(rounds: list[RoundRecord]) -> Table:
    headings = ("round", "here", "counted", "left out", "sent", "waited", "loss")
    made = tables.FittedTable(*headings)
    for each in rounds:
        decision, notes = each.decision, each.notes
        counted = "it runs" if decision is None else " ".join(decision.members) or "nobody"
        made.add_row(
            str(each.number),
            str(len(each.here)),
            "damaged" if each.problem else counted,
            "" if decision is None else " ".join(decision.left_out),
            format_bytes(sum(notes.sizes.values())) if notes.sizes else "",
            "" if decision is None else format_seconds(notes.waited),
            f"{fmean(notes.losses.values()):.4f}" if notes.losses else "",
        )
    return made


def _draw(path: Path, rounds: list[RoundRecord]) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    for name in sorted({name for each in rounds for name in each.notes.losses}):
        told = [(r.number, r.notes.losses[name]) for r in rounds if name in r.notes.losses]
        axes.plot(*zip(*told, strict=True), marker=".", label=name)
    axes.set(xlabel="round", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=150)
