"""Tables of the page on TPUs: from aot_tpu.json, and from the cost model of `advise`."""

from docs.scripts.advised import between_slices
from docs.scripts.result_files import markdown, results_of
from dynamiq_jax._console.units import format_rate, format_seconds, parse_rate
from dynamiq_jax._prediction.tpus import LINKS, hiding_tokens

_GENERATIONS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}


def tpu_slices() -> str:
    """Write times of an all-reduce between two slices of TPUs, by `dynamiq-jax advise`."""
    rows = []
    for kind, link in LINKS.items():
        rate = parse_rate(link, "link")
        for size in ("8Mi", "32Mi", "256Mi"):
            plain, ours = (option.all_reduce for option in between_slices(kind, size))
            rows.append(
                [
                    kind[4:],
                    f"{format_rate(rate)}, {rate / 8e9:.3g} GB/s",
                    size.replace("Mi", " Mi"),
                    format_seconds(plain.total),
                    format_seconds(ours.total),
                    f"{plain.total / ours.total:.2f}x",
                    f"{ours.codec / ours.wire:.0%}",
                    f"{hiding_tokens(kind, 2, rate, 2):,.0f}",
                ]
            )
    header = ["TPU", "link of a chip", "coordinates of a chip", "`psum`, bfloat16", "5 bits"]
    header += ["gain", "codec over wire", "tokens of a slice that hide `psum`"]
    return markdown(header, rows)


def tpu_kernels() -> str:
    """Write the cycles of a coordinate in each kernel, by generation."""
    results = results_of("aot_tpu")
    rows = []
    for what in results[_GENERATIONS["v5e"]]["kernels"]["float32"]:
        for dtype in ("float32", "bfloat16"):
            kernels = [results[name]["kernels"][dtype] for name in _GENERATIONS.values()]
            if all(what in of_dtype for of_dtype in kernels):
                cycles = (f"{of_dtype[what]['cycles_per_coordinate']:.4f}" for of_dtype in kernels)
                rows.append([what, dtype, *cycles])
    return markdown(["kernel", "rows", *_GENERATIONS], rows)


def tpu_sums() -> str:
    """Write times, memory traffic and compile time of compressed sums on 8 chips a slice."""
    rows = []
    for generation, topology in _GENERATIONS.items():
        of_topology = results_of("aot_tpu")[topology]
        for program in of_topology["programs"]:
            if program["sum"] == "exact":
                continue
            cycles = program["kernel_cycles"] + program["other_cycles"]
            shares = program["share_of_transfer"].values()
            rows.append(
                [
                    generation,
                    program["sum"],
                    str(program["slices"]),
                    f"{program['size'] / 2**20:g} Mi",
                    f"{program['kernel_cycles'] / cycles:.0%}",
                    format_seconds(1e-6 * cycles / of_topology["clock_mhz"]),
                    ", ".join(f"{share:.0%}" for share in shares),
                    f"{program['compile_cpu_seconds']:.1f} s",
                ]
            )
    header = ["TPU", "sum", "slices", "coordinates", "in kernels", "time at the clock"]
    return markdown([*header, "over wire, 3.1 and 6.25 GB/s", "compile, one core"], rows)


ALL = (
    tpu_kernels,
    tpu_slices,
    tpu_sums,
)
