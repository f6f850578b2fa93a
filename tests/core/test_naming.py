"""Methods and topologies by name: one rule for names, one grammar for options, helpful errors."""

import dataclasses
import inspect
import re

import pytest

import dynamiq_jax as dq
from dynamiq_jax._core import naming
from dynamiq_jax.methods import METHODS, BlockInt, ErrorFeedback, resolve_method
from dynamiq_jax.methods._registry import PRESETS, WRAPPERS
from dynamiq_jax.topologies import TOPOLOGIES, Butterfly, Ring, resolve_topology

# Several names share these files.
FAMILIES = {"_mx": ("mxfp8", "mxfp6", "mxfp4", "mxint8"), "_baselines": ("exact", "bf16")}


def test_every_name_gives_the_defaults_of_its_class():
    assert {name: type(resolve_method(name)) for name in METHODS} == METHODS
    assert {name: type(resolve_topology(name)) for name in TOPOLOGIES} == TOPOLOGIES
    for name, cls in METHODS.items():
        assert resolve_method(name) == cls()
    for name, cls in TOPOLOGIES.items():
        assert resolve_topology(name) == cls()


@pytest.mark.parametrize("name", (*METHODS.own, *TOPOLOGIES))
def test_names_are_lower_case_and_name_the_class_and_its_file(name):
    cls = {**METHODS, **TOPOLOGIES}[name]
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    assert name.replace("_", "") == cls.__name__.lower()
    *_, package, file = inspect.getmodule(cls).__name__.split(".")
    assert name in (file.removeprefix("_"), package) or name in FAMILIES[file]


@pytest.mark.parametrize("name", PRESETS)
def test_names_of_presets_are_those_of_their_constructors(name):
    preset = PRESETS[name]
    assert preset.__name__ == name
    assert resolve_method(name) == preset()
    assert resolve_method(name) != type(preset())()  # with other defaults
    assert name not in METHODS


@pytest.mark.parametrize(
    ("text", "method"),
    (
        ("dynamiq:4", dq.DynamiQ(bits=4.0)),
        ("dynamiq:4.5", dq.DynamiQ(bits=4.5)),
        ("dynamiq:bits=4", dq.DynamiQ(bits=4.0)),
        ("dynamiq:4:rounding=nearest", dq.DynamiQ(bits=4.0, rounding="nearest")),
        ("dynamiq:rounding=nearest:4", dq.DynamiQ(bits=4.0, rounding="nearest")),
        ("dynamiq:6:widths=(4, 8)", dq.DynamiQ(bits=6.0, widths=(4, 8))),
        ("paper", dq.DynamiQ.paper()),
        ("paper:4", dq.DynamiQ.paper(bits=4.0)),
        ("qgz", BlockInt(code_bits=4, block=128)),
        ("qgz:rounding=stochastic", BlockInt(code_bits=4, block=128, rounding="stochastic")),
        ("equarx:block=64", BlockInt(code_bits=8, block=64)),
        ("blockint:4", BlockInt(code_bits=4)),
        ("blockint:4:block=256", BlockInt(code_bits=4, block=256)),
        ("ef+blockint:4", ErrorFeedback(inner=BlockInt(code_bits=4))),
        ("ef+paper:4", ErrorFeedback(inner=dq.DynamiQ.paper(bits=4.0))),
        ("ef+bf16", ErrorFeedback(inner=dq.methods.BF16())),
    ),
)
def test_options_after_a_name_change_its_fields_and_a_method_is_returned_as_it_is(text, method):
    assert resolve_method(text) == method
    assert resolve_method(method) is method


def test_a_topology_has_options_and_is_returned_as_it_is():
    assert resolve_topology("ring:unroll=True") == Ring(unroll=True)
    mine = Butterfly()
    assert resolve_topology(mine) is mine


UNKNOWN = ("", "dynamic", "DynamiQ", "bf-16", "dynamiq :5", ":5", "ring", "psum")
UNKNOWN += ("ef", "ef+", "+bf16", "ef+ring", "ef+ef+bf16", "fe+bf16", "EF+bf16")
NO_NAMES = (None, 5, dq.DynamiQ, Ring(), b"bf16")


@pytest.mark.parametrize("given", (*UNKNOWN, *NO_NAMES))
def test_an_unknown_method(given):
    says = rf"^method={re.escape(repr(given))} is not known\. Give a method such as "
    with pytest.raises(ValueError, match=says) as info:
        resolve_method(given)
    names = (*METHODS, *PRESETS, "dynamiq:5", "ef+")
    assert all(repr(name) in str(info.value) for name in names)


@pytest.mark.parametrize("text", ("", "Ring", "bf16", "ring+ring", ":unroll=True"))
def test_an_unknown_topology(text):
    says = rf"^topology={re.escape(repr(text))} is not known\. Give one of \['all_to_all'"
    with pytest.raises(ValueError, match=says) as info:
        resolve_topology(text)
    assert all(repr(name) in str(info.value) for name in TOPOLOGIES)


# Text, and what the error says after quoting it.
WRONG_METHODS = (
    ("dynamiq:5:bit=4", r"dynamiq has no field 'bit'\. Give FIELD=VALUE with a field of \['bi"),
    ("bf16:x=1", r"bf16 has no field 'x'\. Give the name alone\.$"),
    ("mxfp8:elements=1", r"mxfp8 has no field 'elements'\. Give .* \['element'"),
    ("ef+bf16:inner=1", r"bf16 has no field 'inner'\."),
    # Twice.
    ("dynamiq:5:bits=4", r"gives 'bits' a second time\. Give it once\.$"),
    ("dynamiq:5:4", r"gives 'bits' a second time\."),
    ("blockint:8:code_bits=8", r"gives 'code_bits' a second time\."),
    ("blockint:block=256:block=512", r"gives 'block' a second time\."),
    # Neither a number nor a field.
    ("bf16:16", r"'16' is not an option of bf16\. Give the name alone\.$"),
    ("mxfp8:8", r"'8' is not an option of mxfp8\. Give FIELD=VALUE with .*\]\.$"),
    ("dynamiq:", r"'' is not an option of dynamiq\. Give a number of bits, or FIELD=VALUE"),
    (
        "blockint:wide",
        r"'wide' is not an option of blockint\. Give a number of code_bits, or FIELD=VAL",
    ),
    # A setting of the command line, which names the topology too.
    ("dynamiq:5:ring", r"'ring' is not an option of dynamiq\. .*Compression\(topology='ring'\)\.$"),
    ("bf16:ring", r"'ring' is not an option of bf16\. .*Compression\(topology='ring'\)\.$"),
    # Values that the class refuses.
    ("dynamiq:99", r"bits=99 is out of range\. Give 2\.375 to 16\.$"),
    ("dynamiq:nan", r"bits=nan is out of range\."),
    ("blockint:4.5", r"code_bits=4\.5 is not possible\."),
    ("dynamiq:rounding=up", r"rounding='up' is not possible\. Give one of \(None, 'correlated'"),
    ("dynamiq:widths=[{[]}]", r"widths=.* is not a tuple"),
)
WRONG_TOPOLOGIES = (
    ("ring:2", r"'2' is not an option of ring\. Give FIELD=VALUE with .*'unroll'\]\.$"),
    ("ring:bf16", r"'bf16' is not an option of ring\. Give FIELD=VALUE with .*'unroll'\]\.$"),
    ("butterfly:x=1", r"butterfly has no field 'x'\. Give the name alone\.$"),
    ("ring:unroll=1:unroll=1", r"gives 'unroll' a second time\."),
)


@pytest.mark.parametrize(
    ("resolve", "text", "says"),
    [
        *((resolve_method, *each) for each in WRONG_METHODS),
        *((resolve_topology, *each) for each in WRONG_TOPOLOGIES),
    ],
)
def test_errors_quote_the_text_and_say_what_to_give(resolve, text, says):
    kind, quoted = resolve.__name__.removeprefix("resolve_"), text.removeprefix("ef+")
    with pytest.raises(ValueError, match=rf"^{kind}={re.escape(repr(quoted))}:? .*{says}"):
        resolve(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Both:
    """A strategy with both budgets, and a field that nobody sets."""

    code_bits: int = 1
    bits: float = 2.0
    values: tuple = ()
    made: int = dataclasses.field(default=0, init=False)


def test_a_bare_number_is_the_whole_budget_where_there_are_two():
    assert naming.make("x", "both:5", {"both": Both}) == Both(bits=5.0)
    assert naming.field_names(Both) == {"code_bits", "bits", "values"}
    with pytest.raises(ValueError, match="both has no field 'made'"):
        naming.make("x", "both:made=1", {"both": Both})


@pytest.mark.parametrize(
    ("text", "value"),
    (("(1, 2)", (1, 2)), ("1e-3", 1e-3), ("True", True), ("None", None), ("a=b", "a=b"), ("", "")),
)
def test_values_are_python_literals_or_text(text, value):
    made = naming.make("x", f"both:values={text}", {"both": Both}).values
    assert made == value and type(made) is type(value)


@pytest.mark.parametrize("text", ("marsit", "ef+thc:6", "gc+bf16", "top_k:2"))
def test_a_method_of_research_that_is_not_installed_says_what_to_install(text, monkeypatch):
    for registry in (METHODS, WRAPPERS):
        monkeypatch.setitem(vars(registry), "installed", {})
    with pytest.raises(
        ValueError, match=r"is in dynamiq-jax-research\. In a checkout .* pip install \./research"
    ):
        resolve_method(text)
