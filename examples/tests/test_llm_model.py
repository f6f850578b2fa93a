"""Decoders of `examples/llm`: their logits against two references, and their configuration."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from examples.llm.checkpoint import load, read_config
from examples.llm.model import Decoder
from examples.tests.support import llm_oracle as oracle
from examples.tests.support.llm_configs import LLAMA
from tests.support.others import package

TIME = 20
CASES = {
    "llama": LLAMA,
    "tied, no scaling": LLAMA | {"tie_word_embeddings": True, "rope_scaling": None},
    "linear scaling, a head of its own keys each": LLAMA
    | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "num_key_value_heads": 4},
}


def decoder(folder, **options) -> Decoder:
    config = read_config(folder)
    params = load(folder, config, SingleDeviceSharding(jax.devices()[0]))
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))
    return nnx.merge(nnx.split(abstract, nnx.Param)[0], params)


def random_tokens(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 48, size=(rows, TIME), dtype=np.int32)


def run(model: Decoder, tokens, **options) -> np.ndarray:
    structure, params = nnx.split(model)
    compute = jax.jit(lambda params, tokens: nnx.merge(structure, params)(tokens, **options))
    return np.asarray(compute(params, tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    oracle.write(path, LLAMA, oracle.random_tensors(LLAMA))
    return path


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_the_oracle(hf, tmp_path):
    oracle.write(tmp_path, hf, oracle.random_tensors(hf), files=1 if hf["rope_scaling"] else 3)
    tokens = random_tokens()
    logits = run(decoder(tmp_path, dtype=jnp.float32), tokens)
    assert logits.shape == (2, TIME, 48)
    for row, expected in zip(logits, map(list, tokens), strict=True):
        np.testing.assert_allclose(row, oracle.logits(tmp_path, expected), rtol=2e-4, atol=2e-4)


def test_bfloat16_is_near_and_logits_are_float32(folder):
    tokens = random_tokens()
    logits = run(decoder(folder), tokens)
    exact = np.stack([oracle.logits(folder, list(row)) for row in tokens])
    assert logits.dtype == np.float32
    assert 1e-4 < np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2)) < 0.05


def test_packed_documents_give_the_logits_of_separate_ones(folder):
    model = decoder(folder, dtype=jnp.float32)
    lengths = (8, 2, TIME - 10)
    # One document a row, each followed by what it cannot see.
    alone = random_tokens(rows=3)
    rows = zip(alone, lengths, strict=True)
    packed = np.concatenate([row[:length] for row, length in rows])[None].repeat(3, axis=0)
    segments = np.repeat(np.arange(3, dtype=np.int32), lengths)[None].repeat(3, axis=0)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    logits = run(model, packed, positions=positions.repeat(3, axis=0), segments=segments)[0]
    rows = zip(run(model, alone), lengths, strict=True)
    expected = np.concatenate([row[:length] for row, length in rows])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_recomputing_blocks_changes_no_gradient_and_every_parameter_is_used(folder):
    def gradient(remat):
        structure, params = nnx.split(decoder(folder, dtype=jnp.float32, remat=remat), nnx.Param)
        variance = lambda params: nnx.merge(structure, params)(random_tokens()).var()  # noqa: E731
        return jax.jit(jax.grad(variance))(params)

    kept, recomputed = (jax.tree.leaves(gradient(remat)) for remat in (False, True))
    assert all(np.any(leaf) for leaf in kept)
    for ours, theirs in zip(kept, recomputed, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_new_parameters_are_float32_and_give_moderate_logits(folder):
    model = Decoder(read_config(folder), rngs=nnx.Rngs(0))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {leaf.dtype for leaf in params} == {np.dtype("float32")}
    assert 0.1 < run(model, random_tokens()).std() < 10


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_transformers(hf, tmp_path):
    torch = package("torch")
    from transformers import AutoModelForCausalLM

    oracle.write(tmp_path, hf, oracle.random_tensors(hf))
    tokens = random_tokens()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens).long()).logits.numpy()
    logits = run(decoder(tmp_path, dtype=jnp.float32), tokens)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


# ---------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'. Give a checkpoint of type"),
        ({"attention_bias": True}, "attention_bias is True, which is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"head_dim": 7}, "even rotary dimension"),
        ({"num_key_value_heads": 3}, "num_key_value_heads does not divide"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"torch_dtype": "float64"}, "dtype is 'float64'. Weights are written as one of"),
        ({"hidden_size": "wide"}, "does not describe a Llama model"),
    ),
)
def test_other_networks_are_refused_by_name(change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ValueError, match=rf"(?s)config\.json.*{words}"):
        read_config(tmp_path)
