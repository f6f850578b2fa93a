"""Tables of the bytes and the speed of the kernels on a GPU."""

import json
from collections import Counter
from typing import Any

from benchmarks.harness.operations import STEPS
from docs.scripts.result_files import RESULTS, markdown, results_of

# Operations of a ring among this many workers, for the time of a whole all-reduce.
WORKERS = 8
_NAMES = {
    "triton": "Triton",
    "mosaic_gpu": "Mosaic GPU",
    "xla": "XLA",
    "int8": "int8 blocks",
    "mxfp8": "MXFP8",
}


def gpu_sections(name: str = "gpu_kernels") -> dict[str, Any]:
    """Return the results of all sections of a run of `benchmarks.gpu.kernels`."""
    sections = json.loads((RESULTS / f"{name}.json").read_text())["sections"]
    return {name: section["results"] for name, section in sections.items()}


def gpu_times(dtype: str, name: str = "gpu_kernels") -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the size and bits that matter most, by operation and implementation."""
    rows = gpu_sections(name)["main"]["rows"]
    return {(row["operation"], row["implementation"]): row for row in rows if row["dtype"] == dtype}


def gpu_worker_ps() -> float:
    """Return the time of a worker of a ring for each coordinate of float32, in picoseconds."""
    ps = {
        operation: row["ps_per_coordinate"]
        for (operation, implementation), row in gpu_times("float32").items()
        if implementation == "triton" or operation == "places"
    }
    whole = ps["statistics"] + ps["places"] + ps["decompress"]
    return whole + (ps["compress"] + (WORKERS - 1) * ps["hop"]) / WORKERS


def gpu_kernels() -> str:
    """Write the times of the operations on an H200, by backend: gpu_kernels.json."""
    return _times("gpu_kernels", ("float32", "bfloat16"))


def gpu_kernels_h100() -> str:
    """Write the times of the operations on an H100, by backend: gpu_kernels_h100.json."""
    return _times("gpu_kernels_h100", ("float32",))


def _times(name: str, dtypes: tuple[str, ...]) -> str:
    rows = []
    for dtype in dtypes:
        times = gpu_times(dtype, name)
        for operation in STEPS:
            ours = times[operation, "triton"]
            cells = [
                f"{times[key]['ps_per_coordinate']:.2f}" if key in times else ""
                for key in ((operation, name) for name in _NAMES)
            ]
            rows.append([dtype, operation, *cells, f"{ours['fraction_of_copy']:.0%}"])
    return markdown(["rows", "operation", *_NAMES.values(), "Triton, of copy"], rows)


def gpu_checks() -> str:
    """Write how many operations differ from the pure-JAX codec, by backend: gpu_checks.json."""
    rows = []
    for backend in ("triton", "mosaic_gpu"):
        checks = [check for check in results_of("gpu_checks") if check["backend"] == backend]
        verdicts = Counter(check["verdict"] for check in checks)
        by_more = sum(c["differing"] for c in checks if c["verdict"] == "different")
        rows.append(
            [
                _NAMES[backend],
                f"{sum(check['compared'] for check in checks) / 1e6:.1f} MB",
                str(len(checks)),
                *(str(verdicts[kind]) for kind in ("same", "rounding", "different")),
                str(by_more),
            ]
        )
    header = ["kernels", "compared", "operations", "same bytes", "single steps of rounding"]
    return markdown([*header, "by more", "bytes that differ by more"], rows)


ALL = (gpu_kernels, gpu_kernels_h100, gpu_checks)
