"""Decoders of `examples/llm`: their configuration, and their logits against two references."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.llm.checkpoint import load
from examples.llm.config import DecoderConfig, RopeScaling
from examples.llm.model import Decoder, Embedding
from tests.support import llm_oracle as oracle
from tests.support.llm_configs import GEMMA, LLAMA

TIME = 20

CASES = {
    "llama": LLAMA,
    "llama, tied, no scaling": LLAMA | {"tie_word_embeddings": True, "rope_scaling": None},
    "llama, linear scaling, a head of its own keys each": LLAMA
    | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "num_key_value_heads": 4},
    "gemma3": GEMMA,
    "gemma3, untied, no scaling": GEMMA | {"tie_word_embeddings": False, "rope_scaling": None},
}


def decoder(config, params, **options) -> Decoder:
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))
    return nnx.merge(nnx.split(abstract, nnx.Param)[0], params)


def random_tokens(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 48, size=(rows, TIME), dtype=np.int32)


def run(model: Decoder, tokens, **options) -> np.ndarray:
    structure, params = nnx.split(model)
    compute = jax.jit(lambda params, tokens: nnx.merge(structure, params)(tokens, **options))
    return np.asarray(compute(params, tokens))


@pytest.fixture(scope="module", params=[LLAMA, GEMMA], ids=["llama", "gemma3"])
def family(request, tmp_path_factory):
    """The folder of a checkpoint, its configuration and its parameters."""
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.write(folder, request.param, oracle.random_tensors(request.param))
    return folder, *load(folder)


# ----------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_the_oracle(hf, tmp_path):
    oracle.write(tmp_path, hf, oracle.random_tensors(hf), files=1 if hf["rope_scaling"] else 3)
    tokens = random_tokens()
    found = run(decoder(*load(tmp_path), dtype=jnp.float32), tokens)
    assert found.shape == (2, TIME, 48)
    for row, expected in zip(found, map(list, tokens), strict=True):
        np.testing.assert_allclose(row, oracle.logits(tmp_path, expected), rtol=2e-4, atol=2e-4)


def test_bfloat16_is_near_and_logits_are_float32(family):
    folder, config, params = family
    tokens = random_tokens()
    found = run(decoder(config, params), tokens)
    exact = np.stack([oracle.logits(folder, list(row)) for row in tokens])
    assert found.dtype == np.float32
    assert 1e-4 < np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)) < 0.05


def test_packed_documents_give_the_logits_of_separate_ones(family):
    _, config, params = family
    model = decoder(config, params, dtype=jnp.float32)
    lengths = (8, 2, TIME - 10)
    # One document a row, each followed by what it cannot see.
    alone = random_tokens(rows=3)
    rows = zip(alone, lengths, strict=True)
    packed = np.concatenate([row[:length] for row, length in rows])[None].repeat(3, axis=0)
    segments = np.repeat(np.arange(3, dtype=np.int32), lengths)[None].repeat(3, axis=0)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    found = run(model, packed, positions=positions.repeat(3, axis=0), segments=segments)[0]
    rows = zip(run(model, alone), lengths, strict=True)
    expected = np.concatenate([row[:length] for row, length in rows])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_recomputing_blocks_changes_no_gradient(tmp_path):
    hf = GEMMA | {"num_hidden_layers": 1}
    oracle.write(tmp_path, hf, oracle.random_tensors(hf))
    config, params = load(tmp_path)

    def gradient(remat):
        structure = nnx.split(decoder(config, params, dtype=jnp.float32, remat=remat), nnx.Param)[0]
        loss = lambda params: nnx.merge(structure, params)(random_tokens()).var()  # noqa: E731
        return jax.jit(jax.grad(loss))(params)

    kept, recomputed = gradient(remat=False), gradient(remat=True)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(kept)), "some parameter is not used"
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hf", [LLAMA, GEMMA], ids=["llama", "gemma3"])
def test_new_parameters_are_float32_and_give_moderate_logits(hf):
    config = dataclasses.replace(DecoderConfig.from_hf(hf), layers=1, local_layers=())
    model = Decoder(config, rngs=nnx.Rngs(0))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {leaf.dtype for leaf in params} == {np.dtype("float32")}
    assert 0.1 < run(model, random_tokens()).std() < 10


def test_scale_of_the_gemma_embedding_is_rounded():
    embedding = Embedding(DecoderConfig.from_hf(GEMMA), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    table = embedding.weight[...].astype(jnp.bfloat16)
    factor = jnp.bfloat16(np.sqrt(24))
    assert float(factor) != np.sqrt(24)
    np.testing.assert_array_equal(embedding(jnp.arange(48)), table * factor)


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_transformers(hf, tmp_path):
    reason = "compares with torch and transformers, which the tests do not install"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    # All layer types are spelled out: what the pattern means is not up to a version.
    layers = DecoderConfig.from_hf(hf)
    types = [
        "sliding_attention" if layers.is_local(i) else "full_attention"
        for i in range(layers.layers)
    ]
    hf = hf | {"layer_types": types} if hf["model_type"] == "gemma3_text" else hf
    oracle.write(tmp_path, hf, oracle.random_tensors(hf))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_tokens()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    found = run(decoder(*load(tmp_path), dtype=jnp.float32), tokens)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


# ---------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())
def test_an_unchanged_configuration_is_written_as_it_was_read(hf):
    config = DecoderConfig.from_hf(json.loads(json.dumps(hf)))
    assert config.to_hf() == hf
    hash(config)


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())
def test_a_changed_configuration_keeps_what_it_does_not_know(hf):
    changed = dataclasses.replace(DecoderConfig.from_hf(hf), vocabulary=64, rope_theta=77.0)
    written = changed.to_hf()
    assert DecoderConfig.from_hf(written) == changed
    assert (written["vocab_size"], written["rope_theta"]) == (64, 77.0)
    assert written.get("eos_token_id") == hf.get("eos_token_id")


def test_a_new_configuration_can_be_read():
    for family, more in (
        ("llama", {"rope_scaling": RopeScaling("llama3", 8.0)}),
        ("gemma3", {"local_layers": (True, False), "sliding_window": 4, "query_scale": 3}),
        ("gemma3", {"tie_embeddings": True}),
    ):
        config = DecoderConfig(
            family=family,
            vocabulary=9,
            width=8,
            mlp_width=7,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=6,
            **more,
        )
        assert DecoderConfig.from_hf(config.to_hf()) == config


def test_both_spellings_of_rotary_parameters_mean_the_same():
    scaling = LLAMA["rope_scaling"]
    renamed = LLAMA | {"rope_parameters": {"rope_theta": 500.0, **scaling}}
    del renamed["rope_scaling"], renamed["rope_theta"]
    assert DecoderConfig.from_hf(renamed) == DecoderConfig.from_hf(LLAMA)
    assert DecoderConfig.from_hf(renamed).to_hf() == renamed
    changed = dataclasses.replace(DecoderConfig.from_hf(renamed), rope_theta=77.0)
    assert DecoderConfig.from_hf(changed.to_hf()).rope_theta == 77.0

    renamed = GEMMA | {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000.0, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        }
    }
    for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
        del renamed[key]
    assert DecoderConfig.from_hf(renamed) == DecoderConfig.from_hf(GEMMA)


def test_the_text_part_of_gemma3_is_read_with_its_defaults():
    # as the file of the 4 B model has it: everything else is left to defaults
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": 1}
    config = DecoderConfig.from_hf(whole)
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocabulary, config.tie_embeddings) == (262208, True)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    assert [layer for layer in range(34) if not config.is_local(layer)] == [5, 11, 17, 23, 29]
    written = config.to_hf()
    assert (written["model_type"], written["eos_token_id"]) == ("gemma3_text", 1)
    assert DecoderConfig.from_hf(written) == config


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA, {"model_type": "mamba"}, "model_type is 'mamba'"),
        (LLAMA, {"attention_bias": True}, "attention_bias is True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"num_key_value_heads": 3}, "kv_heads is 3"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (GEMMA, {"head_dim": 7}, "head_dim is 7"),
    ],
)
def test_other_networks_are_refused_by_name(base, change, named):
    with pytest.raises(ValueError, match=named.replace("{", "\\{")):
        DecoderConfig.from_hf(base | change)


def test_all_refused_keys_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)attention_bias.*mlp_bias"):
        DecoderConfig.from_hf(LLAMA | {"mlp_bias": True, "attention_bias": True})
