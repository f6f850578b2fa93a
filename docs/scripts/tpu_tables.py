"""Tables of the page on TPUs: from aot_tpu.json, and from the cost model of `advise`."""

from docs.scripts.advised import between_slices
from docs.scripts.result_files import markdown, results_of
from dynamiq_jax._console.units import format_rate, format_seconds, parse_rate
from dynamiq_jax._prediction.device_speeds import TPU_LINKS, hiding_tokens

_GENERATIONS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}


def tpu_slices() -> str:
    """Write times of an all-reduce between two slices of TPUs, by `dynamiq-jax advise`."""
    rows = []
    for kind, link in TPU_LINKS.items():
        rate = parse_rate(link, "link")
        for size in ("8Mi", "256Mi"):
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
    """Write the cycles of a coordinate in each kernel for float32 rows, by generation."""
    kernels = [results_of("aot_tpu")[name]["kernels"]["float32"] for name in _GENERATIONS.values()]
    rows = [
        [what, *(f"{of[what]['cycles_per_coordinate']:.4f}" for of in kernels)]
        for what in kernels[0]
    ]
    return markdown(["kernel", *_GENERATIONS], rows)


def tpu_sums() -> str:
    """Write times of compressed sums on 8 chips a slice, and their share of the transfer."""
    times: dict[tuple[str, int, str], dict[str, str]] = {}
    for generation, topology in _GENERATIONS.items():
        of_topology = results_of("aot_tpu")[topology]
        for program in of_topology["programs"]:
            if program["sum"] == "exact" or "BF16 rows" in program["sum"]:
                continue
            cycles = program["kernel_cycles"] + program["other_cycles"]
            seconds = format_seconds(1e-6 * cycles / of_topology["clock_mhz"])
            share = next(iter(program["share_of_transfer"].values()))
            case = program["sum"], program["slices"], f"{program['size'] / 2**20:g} Mi"
            times.setdefault(case, {})[generation] = f"{seconds}, {share:.0%}"
    rows = [
        [name, str(slices), size, *(of.get(generation, "") for generation in _GENERATIONS)]
        for (name, slices, size), of in times.items()
    ]
    return markdown(["sum", "slices", "coordinates", *_GENERATIONS], rows)


ALL = (tpu_kernels, tpu_slices, tpu_sums)
