"""Figures that several pages have: they are those of the library and of the result files."""

import re

from docs.scripts import choice_tables, tables
from docs.scripts.advised import break_even_gbit, gain_of_a_step
from docs.scripts.result_files import results_of
from dynamiq_jax.contrib import LEVELS
from dynamiq_jax.methods import METHODS, WRAPPERS
from dynamiq_jax.topologies import TOPOLOGIES
from dynamiq_jax.topologies._device_speeds import CODEC_SPEEDS
from tests.project.test_docs import PAGES

_ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
_ONES += ["twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]
_ONES += ["nineteen"]
_TENS = ("twenty", "thirty")
NUMBERS = {word: number for number, word in enumerate(_ONES, 1)}
NUMBERS |= {ten: 20 + 10 * index for index, ten in enumerate(_TENS)}
NUMBERS |= {f"{ten}-{one}": NUMBERS[ten] + NUMBERS[one] for ten in _TENS for one in _ONES[:9]}
COUNTS = {
    "methods": len(METHODS) + len(WRAPPERS),
    "methods of the product": len(METHODS.own) + len(WRAPPERS.own),
    "methods of research": len(METHODS.installed) + len(WRAPPERS.installed),
    "systems of research": len(LEVELS),
    "topologies": len(TOPOLOGIES),
}


def test_pages_count_methods_systems_and_topologies_alike():
    """Wherever a number is before one of these words."""
    things = "|".join(sorted(COUNTS, key=len, reverse=True))
    words = "|".join(sorted(NUMBERS, key=len, reverse=True))
    pattern = rf"\b({words}|\d+) ({things})\b"
    found = [
        (page, number.lower(), thing)
        for page, text in PAGES.items()
        for number, thing in re.findall(pattern, plain(text), flags=re.IGNORECASE)
    ]
    assert {thing for _, _, thing in found} == COUNTS.keys()
    wrong = [
        (page, number, thing)
        for page, number, thing in found
        if NUMBERS.get(number, number) not in (COUNTS[thing], str(COUNTS[thing]))
    ]
    assert wrong == []


def plain(text: str) -> str:
    """Return a text without the marks of links."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def test_break_evens_of_a_cpu_are_alike_on_both_pages():
    """One table has them by dtype, and the choice between methods follows from them."""
    of_bf16, of_f32 = (break_even_gbit("cpu", "100M", dtype) for dtype in ("bf16", "f32"))
    assert of_bf16 < of_f32
    table = tables.break_even()
    for dtype, gbit in (("float32", of_f32), ("bfloat16", of_bf16)):
        assert re.search(rf"\| CPU \|[^|]*\| {dtype} \| {gbit:g} Gbit/s \|", table)
    choices = choice_tables.which_method()
    assert f'| more than {of_bf16:g} Gbit/s, CPUs | `"bf16"` |' in choices
    assert f"from {of_f32:g} Gbit/s on, so is `psum` of float32" in choices
    assert table in PAGES["docs/should_i_compress.md"]
    assert choices in PAGES["docs/which_method.md"]


def test_break_evens_of_a_cpu_come_from_a_measured_codec():
    """Their rounded time is between those of the parts at both sizes that were measured."""
    sums: dict[int, float] = {}
    for row in results_of("codec"):
        if row["method"] == "5 bits":
            sums[row["size"]] = sums.get(row["size"], 0.0) + row["ns"]
    assert len(sums) == 2
    assert min(sums.values()) < CODEC_SPEEDS["cpu"].ns_per_coordinate < max(sums.values())


def test_nothing_is_gained_on_nvlink():
    """As the pages say: steps are as long as before, within a few percent."""
    gains = [gain_of_a_step("3600gbit", overlap) for overlap in (0.0, 0.5)]
    assert 1 < gains[0] < 1.02 and 0.96 < gains[1] < 0.98
    assert "a step gains 1% or loses 3%" in PAGES["docs/should_i_compress.md"]
    assert "| NVLink, or inside one host | `jax.lax.pmean` |" in PAGES["docs/which_method.md"]
    assert "Nothing is gained on fast links, such as NVLink" in PAGES["README.md"]


def test_speed_ups_in_the_text_are_those_of_the_table():
    """Of the sentence that opens the page of results, and of the bits that the README has."""
    links = results_of("time_to_accuracy")["links"]
    seconds = {(r["setting"], r["rate"]): r["to_target"]["0.99"]["seconds"] for r in links}
    ours = ("dynamiq:4:ring", "dynamiq:5:ring")
    ratios = {
        rate: [seconds["bf16:ring", rate] / seconds[setting, rate] for setting in ours]
        for rate in (1e8, 2e8, 1e9)
    }
    slow = [*ratios[1e8], *ratios[2e8]]
    text = PAGES["docs/results.md"]
    assert f"{min(slow):.1f} to {max(slow):.1f} times sooner than BF16 on links of 100 and" in text
    assert f"{min(ratios[1e9]):.1f} to {max(ratios[1e9]):.1f} times sooner on 1 Gbit/s" in text
    offs = [
        off
        for row in results_of("time_to_accuracy")["final_losses"]
        if row["setting"] in ours
        for off in row["off"].values()
    ]
    offs += [
        off
        for r in results_of("final_loss")
        if r["method"] in ("dynamiq:4", "dynamiq:5")
        for off in r["off"]
    ]
    assert "differ from the exact one by at most 0.2%" in text
    assert round(max(map(abs, offs)), 3) == 0.002


def test_the_error_of_the_readme_is_that_of_the_results():
    (row,) = (
        row
        for row in results_of("compare_ring")
        if row["workers"] == 8 and row["method"] == "dynamiq:5"
    )
    errors = [step["vnmse"] for step in row["steps"].values()]
    assert f"[{100 * min(errors):.2f} to {max(errors):.2%}](docs/results.md" in PAGES["README.md"]


def test_figures_of_emulated_hosts_say_so():
    """In the caption below each."""
    figures = "time_to_accuracy|time_to_accuracy_local_sgd|time_to_accuracy_low_bits|cost_model"
    pattern = rf"^!\[[^]]*\]\([^)]*/(?:{figures})\.png\)\n\n(.*)$"
    captions = [
        (page, caption)
        for page, text in PAGES.items()
        for caption in re.findall(pattern, text, flags=re.MULTILINE)
    ]
    assert {page for page, _ in captions} >= {"README.md", "docs/results.md"}
    wrong = [(page, text) for page, text in captions if "emulated on two CPU cores" not in text]
    assert wrong == []


def test_the_error_on_a_real_model_is_that_of_its_result_file():
    """In the README, and in the first sentences of the page of results."""
    errors = {
        (row["method"], row["text"]): row["vnmse"]
        for row in results_of("real_lm_errors")
        if (row["step"], row["workers"], row["topology"]) == (0, 8, "ring")
    }
    ours = [errors["dynamiq:5", text] for text in ("chats", "plain")]
    assert {f"{error:.2%}" for error in ours} == {"0.08%"}
    readme = plain(PAGES["README.md"])
    assert "SmolLM2-135M, the squared error is 0.08%" in readme
    over = {
        other: [errors["dynamiq:5", t] / errors[other, t] for t in ("chats", "plain")]
        for other in ("mxfp8", "blockint:5", "paper:5")
    }
    assert {round(1 / ratio) for ratio in over["mxfp8"]} <= {7, 8}
    page = PAGES["docs/results.md"]
    least, most = sorted(over["mxfp8"])
    assert f"has {least:.2f} to {most:.2f} times the error of MXFP8" in page
    assert all(0.08 < ratio < 0.105 for ratio in over["blockint:5"])  # "a tenth"
    assert all(0.45 < ratio < 0.5 for ratio in over["paper:5"])  # "half"
    of_paper = sorted(errors["mxfp8", t] / errors["paper:5", t] for t in ("chats", "plain"))
    for name in ("docs/results.md", "docs/differences.md"):
        assert "{:.1f} to {:.1f} times".format(*of_paper) in PAGES[name]
