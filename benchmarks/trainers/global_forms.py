"""Global steps in the forms that people write, by `dq.compress`: losses and bytes.

    python -m benchmarks.trainers.global_forms

The forms are those of tests/compress. Each runs on eight virtual devices with automatic axes, and
with explicit ones where JAX takes it. Rows that another version of JAX has written are kept: run it
once with each.
"""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

import dynamiq_jax as dq
from benchmarks.harness import command, files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.processes import in_process
from tests.compress.global_forms import FORMS, Form, Step
from tests.compress.global_runs import (
    CASES,
    OPTIONS,
    of_pmean,
    over_data,
    placed,
    run,
    sent_over_data,
)

NAME = "global_forms"


@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""

    forms: tuple[str, ...] = ()  # by their names in tests/compress; none: all
    steps: int = 20  # whose losses are compared
    save: bool = True  # write the result to benchmarks/results/global_forms.json


@command.benchmark(NAME)
def main(config: Config) -> command.Report:
    """Run the forms in a process with eight devices, and replace their rows."""
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    rows = in_process(measure_all, config.forms, config.steps, environment=devices)
    new = [row | {"jax": jax.__version__} | files.stamp() for row in rows]
    path = files.path_of(NAME)
    earlier = json.loads(path.read_text())["results"] if config.save and path.exists() else []
    replaced = {_key(row) for row in new}
    results = [row for row in earlier if _key(row) not in replaced] + new
    return command.Report(
        results=sorted(results, key=_key),
        shown=[table("Global steps, exact and by dq.compress", COLUMNS, new)],
        options={"steps": config.steps, "devices": 8},
    )


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["jax"], row["form"], row["kind"]


def measure_all(forms: list[str], steps: int) -> list[dict[str, Any]]:
    """Run the forms on axes of each kind that JAX takes."""
    cases = [(name, kind) for name, kind in CASES if not forms or name in forms]
    return [
        {"form": name, "kind": kind} | measure(FORMS[name], kind, steps) for name, kind in cases
    ]


def measure(form: Form, kind: str, steps: int) -> dict[str, Any]:
    """Compare the losses of exact sums, and the bytes of compressed ones, with the jitted step."""
    around, mesh, made = placed(form, kind)
    with around:
        plain = made.jitted()
        losses, state = run(
            dq.compress(plain, "data", method=dataclasses.replace(OPTIONS, method="exact")),
            made,
            steps,
        )
        expected, wanted = run(plain, made, steps)
        scale = np.maximum(np.abs(expected), 1e-3 * np.abs(expected[0]))  # some losses end at zero
        return {
            "axes": dict(form.axes),
            "difference": float(np.max(np.abs(losses - expected) / scale)),
            "last_loss": float(expected[-1]),
            "arrays": len(jax.tree.leaves(wanted)),
            "arrays_of_equal_bits": sum(
                bool(np.array_equal(got, want))
                for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True)
            ),
        } | bytes_of(form, made, mesh)


def bytes_of(form: Form, made: Step, mesh: Any) -> dict[str, Any]:
    """Count the bytes that a device sends over the axis of the workers, in the compiled programs.

    The surplus is that of all messages of the groups over those of `dq.pmean` of the same sums.
    """
    plain = made.jitted()
    step = dq.compress(plain, "data", method=OPTIONS)
    report = step.report(made.state, *made.batch)
    groups = [
        [each for each in report.sums if each.group == group] for group in range(report.num_groups)
    ]
    means = sum(
        (members[0].times or 1) * of_pmean([each.sum for each in members], made, mesh)
        for members in groups
    )
    sent = sent_over_data(step, made, mesh)
    return {
        "compressed": len(report.compressed),
        "groups": report.num_groups,
        "bytes_before": over_data(plain, made, mesh),
        "bytes_after": sum(each.bytes for each in sent),
        "surplus": sum(each.bytes for each in sent if each.labels) - means,
    }


COLUMNS = (
    Column("form", "form"),
    Column("axes", "kind"),
    Column("losses off by", "difference", "{:.1e}"),
    Column("arrays", "arrays"),
    Column("of equal bits", "arrays_of_equal_bits"),
    Column("sums compressed", "compressed"),
    Column("bytes by jax.jit", "bytes_before", "{:,.0f}"),
    Column("by dq.compress", "bytes_after", "{:,.0f}"),
    Column("more than dq.pmean", "surplus", "{:.0f}"),
)


if __name__ == "__main__":
    command.run(main, __doc__)
