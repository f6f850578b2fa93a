"""Error of buckets in order on a real language model, with bits by `allocate_bits`.

    make demo-llm
    python -m research.benchmarks.real_lm_allocated

Rows go to the file of `benchmarks.real_lm.errors`, beside those of equal bits. Bits follow from the
gradient of one worker.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jax import Array

import dynamiq_jax as dq
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.real_lm import errors
from benchmarks.real_lm.errors import ALLOCATED
from dynamiq_research import allocate_bits


@dataclasses.dataclass(frozen=True)
class Config(errors.Config):
    """Options of the benchmark, of which methods are those with equal bits."""

    methods: tuple[str, ...] = ("dynamiq:5",)
    bucketing: Literal["auto", "striped", "in_order"] = "in_order"


@benchmark("real_lm_errors")
def main(config: Config) -> Iterator[Report]:
    """Measure what the result file lacks."""
    methods = tuple(f"{ALLOCATED}{method}" for method in config.methods)
    return errors.reports(dataclasses.replace(config, methods=methods), allocated)


def allocated(row: dict[str, Any], stacked: dict[str, Array]) -> dq.Compression:
    """Return the compression of a row, with bits from the gradient of the first worker."""
    own = {name: leaf.addressable_data(0)[0] for name, leaf in stacked.items()}
    equal = errors.setting_of(row | {"method": row["method"].removeprefix(ALLOCATED)}, stacked)
    return allocate_bits(own, axis_size=row["workers"], method=equal).compression


if __name__ == "__main__":
    run(main, __doc__)
