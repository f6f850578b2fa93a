"""Bytes of the kernels for NVIDIA GPUs beside those of the pure-JAX codec, in all cases of `verify`.

    python -m benchmarks.gpu.checks

Makes the comparison of `dynamiq-jax verify`, each case of each backend in a process of its own:
nearly all of the time goes to compilers, which take one core of a process. Needs JAX with CUDA,
nothing but what the library needs besides, and no installation.
"""

import argparse
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.harness import files
from dynamiq_jax._measurement.kernel_checks import (
    CASES,
    INTERPRETED_CASES,
    KernelVerdict,
    check_kernels,
)
from pallas_kernels.registry import BACKENDS, BASE

_BACKENDS = (
    *(backend.name for backend in BACKENDS.values() if backend.platform == "cuda"),
    BASE.name,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write the result; return 1 if an operation is wrong or fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, help="of `dynamiq-jax verify`; all by default")
    add("--interpret", action="store_true", help="without a GPU: minutes; writes no result")
    add("--timeout", type=float, default=300, help="seconds of one operation")
    options = parser.parse_args(arguments)
    cases = options.cases or (INTERPRETED_CASES if options.interpret else tuple(CASES))
    tasks = [
        (name, case, options.interpret, options.timeout) for case in cases for name in _BACKENDS
    ]
    # A process takes what it needs of the GPU's memory, and no more: all share one.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    checks: list[dict[str, Any]] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for found in pool.map(_check, *zip(*tasks, strict=True)):
            checks += found
            for each in found:
                print(" ".join(map(str, each.values())), flush=True)
    if not options.interpret:
        config = {"backends": _BACKENDS, "cases": cases, "timeout": options.timeout}
        print(files.write(files.path_of("gpu_checks"), config, checks))
    return int(any(check["verdict"] in ("different", "failed") for check in checks))


def _check(backend: str, case: str, interpret: bool, timeout: float) -> list[dict[str, Any]]:
    """Compare a backend in one case; return the operations that it has."""
    checks = check_kernels(
        [backend], [case], interpret=interpret, timeout=timeout, done=lambda _: None
    )
    return [
        dataclasses.asdict(check) | {"verdict": check.verdict.name.lower()}
        for check in checks
        if check.verdict not in (KernelVerdict.NOT_HERE, KernelVerdict.ABSENT)
    ]


if __name__ == "__main__":
    sys.exit(main())
