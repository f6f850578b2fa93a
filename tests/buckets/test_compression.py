"""`dq.Compression`: one value for all functions."""

import dataclasses
import inspect
import re

import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring

# Texts, and the method and topology that they are.
TEXTS = {
    "dynamiq": (dq.DynamiQ(), Ring()),
    "dynamiq:4": (dq.DynamiQ(bits=4), Ring()),
    "dynamiq:4:butterfly": (dq.DynamiQ(bits=4), Butterfly()),
    "dynamiq:butterfly:4": (dq.DynamiQ(bits=4), Butterfly()),
    "dynamiq:ring:unroll=True:rounding=nearest": (
        dq.DynamiQ(rounding="nearest"),
        Ring(unroll=True),
    ),
    "bf16:unroll=True": (dq.methods.BF16(), Ring(unroll=True)),
    "ef+blockint:4:all_to_all": (
        dq.methods.ErrorFeedback(inner=dq.methods.BlockInt(code_bits=4)),
        AllToAll(),
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_a_method_and_a_topology(text):
    compression = dq.Compression(text)
    assert (compression.method, compression.topology) == TEXTS[text]
    assert compression == dq.Compression(*TEXTS[text])
    assert hash(compression) == hash(dq.Compression(*TEXTS[text]))


@pytest.mark.parametrize(
    "compression",
    (
        dq.Compression(),
        dq.Compression("dynamiq:4", "butterfly", exact_below=0),
        dq.Compression("mxfp8", max_error=0.1, bucketing="in_order"),
        dq.Compression("ef+bf16", Ring(unroll=True)),
    ),
)
def test_its_text_makes_it_again(compression):
    names = {name: getattr(dq.methods, name) for name in dir(dq.methods)}
    names |= {name: getattr(dq.topologies, name) for name in dir(dq.topologies)}
    assert eval(repr(compression), names | {"Compression": dq.Compression}) == compression


def test_policies_and_specs_have_a_hash_and_compare():
    def made(bits):
        policy = {"norm": "uncompressed", ".*": f"dynamiq:{bits}"}
        return dq.Compression(policy, specs={"w": P("model"), "b": [P(), P(None)]})

    assert made(5) == made(5) != made(4)
    assert hash(made(5)) == hash(made(5)) != hash(made(4))
    assert "'norm': 'uncompressed'" in repr(made(5))
    other = dataclasses.replace(made(5), specs=P())
    assert other != made(5)
    assert dataclasses.replace(other, specs=made(5).specs) == made(5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (("dynamiq:ring", "ring"), "method='dynamiq:ring' and topology='ring' both give"),
        (("dynamiq:ring:butterfly",), r"several topologies: ['ring', 'butterfly']"),
        (("dynamiq:rung",), "'rung' is not an option of dynamiq"),
        (("dynamiq", "rung"), "topology='rung' is not known"),
        ((3,), "method=3 is not known"),
        (({"w": "dynamiq:ring"},), "dq.Compression(topology='ring')"),
    ),
)
def test_what_is_no_compression_is_refused(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        dq.Compression(*arguments)


def test_every_function_takes_it_as_its_method():
    """With one default, and no function has a second way to say what it says."""
    fields = {field.name for field in dataclasses.fields(dq.Compression)} - {"method"}
    takers = [dq.training.LocalSGD]
    takers += [getattr(dq, name) for name in dq.__all__ if inspect.isfunction(getattr(dq, name))]
    with_method = 0
    for function in takers:
        parameters = inspect.signature(function).parameters
        assert not fields & set(parameters), function
        if "method" in parameters and inspect.isfunction(function):
            assert parameters["method"].default == dq.Compression()
            assert parameters["method"].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
            assert len(parameters) <= 9
        if "key" in parameters:
            assert parameters["key"].kind == inspect.Parameter.KEYWORD_ONLY
        with_method += "method" in parameters
    assert with_method == 8
