"""Checkpoint folders of `examples/llm`: nothing is lost, and bad ones are refused by name."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from examples.llm import checkpoint
from examples.llm.checkpoint import named_leaves, read_config, save
from examples.llm.model import abstract_decoder
from examples.tests.support import llm_oracle as oracle
from examples.tests.support.llm_configs import LLAMA


def load(folder, shardings=None):
    """The configuration and the parameters of a checkpoint, by default on the first device."""
    config, here = read_config(folder), SingleDeviceSharding(jax.devices()[0])
    return config, checkpoint.load(folder, config, shardings or here)


def stored(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder, by their names in the files."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether names, dtypes, shapes and bits are the same."""
    first, second = (
        {name: (t.dtype, t.shape, t.tobytes()) for name, t in each.items()} for each in (one, other)
    )
    return first == second


@pytest.fixture
def llama(tmp_path):
    """A small checkpoint: its folder and its tensors."""
    tensors = oracle.random_tensors(LLAMA)
    oracle.write(tmp_path / "llama", LLAMA, tensors)
    return tmp_path / "llama", tensors


# -------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_was_read_is_written_bit_for_bit(dtype, tmp_path):
    hf, old = LLAMA | {"torch_dtype": dtype}, tmp_path / "old"
    oracle.write(old, hf, oracle.random_tensors(hf, jnp.dtype(dtype)), files=2)
    config, params = load(old)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    for limit, files in ((10**9, 1), (5000, None)):
        save(tmp_path / "new", config, params, old, shard_bytes=limit)
        assert equal(stored(tmp_path / "new"), stored(old))
        assert json.loads((tmp_path / "new" / "config.json").read_text()) == hf
        shards = list((tmp_path / "new").glob("*.safetensors"))
        assert len(shards) == files if files else len(shards) > 2
        assert jax.tree.structure(load(tmp_path / "new")[1]) == jax.tree.structure(params)


def test_an_older_model_in_the_folder_is_replaced(llama, tmp_path):
    old, new = llama[0], tmp_path / "new"
    config, params = load(old)
    (old / "tokenizer.json").write_text("{}")
    (old / "chat_template.jinja").write_text("")
    (old / "thesis.txt").write_text("")
    save(new, config, params, old, shard_bytes=5000)
    (old / "chat_template.jinja").unlink()
    save(new, config, jax.tree.map(lambda leaf: 2 * leaf, params), old)
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in new.iterdir()} == names
    assert equal(stored(new), {name: 2 * tensor for name, tensor in llama[1].items()})


# ---------------------------------------------------------------------------------- where it goes


def test_parameters_are_placed_as_asked_for_and_only_their_parts_are_read(llama, monkeypatch):
    """No read is larger than what one device holds."""
    folder, tensors = llama
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    _, abstract = abstract_decoder(read_config(folder))
    columns = lambda leaf: NamedSharding(mesh, P(None, "fsdp") if leaf.ndim == 2 else P())  # noqa: E731
    shardings, reads, make = jax.tree.map(columns, abstract), [], jax.make_array_from_callback

    def counted(shape, sharding, read):
        def part(index):
            reads.append(read(index).size / np.prod(shape))
            return read(index)

        return make(shape, sharding, part)

    monkeypatch.setattr(jax, "make_array_from_callback", counted)
    _, params = load(folder, shardings)
    by_name = dict(named_leaves(shardings))
    for name, leaf in named_leaves(params):
        assert leaf.sharding == by_name[name]
        np.testing.assert_array_equal(leaf, tensors[name])
    matrices = [tensor for tensor in tensors.values() if tensor.ndim == 2]
    assert reads.count(1 / 4) >= 4 * len(matrices) and set(reads) == {1, 1 / 4}


# ------------------------------------------------------------------------- what files may look like


def test_a_tied_checkpoint_may_store_its_output_layer_too(tmp_path):
    hf = LLAMA | {"tie_word_embeddings": True}
    tensors = oracle.random_tensors(hf)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    oracle.write(tmp_path, hf, tensors | table | tied)
    config, params = load(tmp_path)
    save(tmp_path, config, params)
    assert equal(stored(tmp_path), tensors)


# --------------------------------------------------------------------------------------- refusals


def test_all_tensors_that_do_not_fit_are_named_at_once(llama):
    folder, tensors = llama
    tensors["model.zebra.weight"] = np.ones(3, np.float32)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(23, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit") as caught:
        load(folder)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "lm_head.weight has dtype F64; it may be BF16, F16, F32",
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.norm.weight has shape (23,); it needs (24,)",
        "model.zebra.weight is unexpected",
    ]


@pytest.mark.parametrize(
    ("files", "name", "words"),
    [
        (3, "config.json", "config.json"),
        (3, "model-00002-of-00003.safetensors", "model-00002-of-00003.safetensors"),
        (1, "model.safetensors", r"neither model\.safetensors nor"),
    ],
)
def test_a_missing_file_is_named(files, name, words, tmp_path):
    oracle.write(tmp_path, LLAMA, oracle.random_tensors(LLAMA), files=files)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=words):
        load(tmp_path)


def test_a_file_that_was_cut_off_is_named(llama):
    file = llama[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole file"):
        load(llama[0])


@pytest.mark.parametrize(
    "name",
    (
        "/model.safetensors",
        "../model.safetensors",
        "parts/../../model.safetensors",
        "C:\\model.safetensors",
        "..\\model.safetensors",
        "elsewhere/model.safetensors",  # a link to another folder
        "a\0b",
        "",
        ".",
        3,
    ),
)
def test_an_index_names_files_in_its_folder_only(name, tmp_path):
    folder = tmp_path / "start"
    oracle.write(folder, LLAMA, oracle.random_tensors(LLAMA), files=2)
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    (folder / "elsewhere").symlink_to(tmp_path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    words = rf"index\.json names the file {re.escape(repr(name))}, which is not inside of .*without"
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_files_may_be_in_subfolders_and_links_to_where_a_cache_keeps_them(tmp_path):
    cache, folder = tmp_path / "cache", tmp_path / "start"
    tensors = oracle.random_tensors(LLAMA)
    oracle.write(folder, LLAMA, tensors, files=2)
    cache.mkdir()
    first, second = sorted(folder.glob("*.safetensors"))
    first.rename(cache / "bytes")
    first.symlink_to(cache / "bytes")
    (folder / "parts").mkdir()
    second.rename(folder / "parts" / second.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(second.name, f"parts/{second.name}"))
    save(tmp_path / "new", *load(folder), folder)
    assert equal(stored(tmp_path / "new"), tensors)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    (
        (b"", "is broken JSON: Expecting value"),
        (b'{"a": 1', "is broken JSON: Expecting ',' delimiter"),
        (b'{"a": "\xff\xff"}', "is broken JSON: .*decode"),
        (b"[" * 10**5, "is broken JSON: "),
        (b"[]", "has a list, not a JSON object"),
        (b"null", "has a NoneType, not a JSON object"),
    ),
)
def test_broken_json_names_its_file(name, content, words, tmp_path):
    oracle.write(tmp_path, LLAMA, oracle.random_tensors(LLAMA), files=2)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"/{name} {words}.*Copy or download the checkpoint"):
        load(tmp_path)
