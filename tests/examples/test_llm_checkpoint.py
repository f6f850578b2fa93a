"""Checkpoint folders of `examples/llm`: nothing is lost, and bad ones are refused by name."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from examples.llm import checkpoint
from examples.llm.checkpoint import load, named_leaves, save
from examples.llm.model import abstract_params
from examples.llm.stored_tensors import StoredTensor
from tests.support import llm_oracle as oracle
from tests.support.llm_configs import GEMMA, LLAMA

FAMILIES = pytest.mark.parametrize("hf", [LLAMA, GEMMA], ids=["llama", "gemma3"])


def stored(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder, by their names in the files."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether names, dtypes, shapes and bits are the same."""
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and one[n].tobytes() == other[n].tobytes()
        for n in one
    )


@pytest.fixture
def llama(tmp_path):
    """A small checkpoint: its folder and its tensors."""
    tensors = oracle.random_tensors(LLAMA)
    oracle.write(tmp_path / "llama", LLAMA, tensors)
    return tmp_path / "llama", tensors


# -------------------------------------------------------------------------------- there and back


@FAMILIES
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_was_read_is_written_bit_for_bit(hf, dtype, tmp_path):
    oracle.write(tmp_path / "old", hf, oracle.random_tensors(hf, dtype), files=2)
    config, params = load(tmp_path / "old")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(dtype)}
    for limit, files in ((10**9, 1), (5000, None)):
        save(tmp_path / "new", config, params, shard_bytes=limit)
        assert equal(stored(tmp_path / "new"), stored(tmp_path / "old"))
        assert json.loads((tmp_path / "new" / "config.json").read_text()) == hf
        shards = list((tmp_path / "new").glob("*.safetensors"))
        assert len(shards) == files if files else len(shards) > 2
        again, read = load(tmp_path / "new")
        assert again == config
        assert jax.tree.structure(read) == jax.tree.structure(params)


def test_files_are_no_larger_than_asked_for_and_the_index_is_right(llama, tmp_path):
    config, params = load(llama[0])
    save(tmp_path / "new", config, params, shard_bytes=6000)
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in llama[1].values())
    held = {}
    for file in (tmp_path / "new").glob("*.safetensors"):
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 6000
        held |= dict.fromkeys(tensors, file.name)
    assert index["weight_map"] == held


def test_an_older_checkpoint_in_the_folder_is_replaced(llama, tmp_path):
    config, params = load(llama[0])
    new = tmp_path / "new"
    save(new, config, params, shard_bytes=5000)
    (new / "tokenizer.json").write_text("{}")
    save(new, config, jax.tree.map(lambda leaf: 2 * leaf, params))
    assert {file.name for file in new.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert equal(stored(new), {name: 2 * tensor for name, tensor in llama[1].items()})


def test_parameters_are_converted_on_the_way(llama, tmp_path):
    folder, tensors = llama
    config, params = load(folder, dtype=jnp.bfloat16)
    rounded = {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    save(tmp_path / "new", config, params)
    assert equal(stored(tmp_path / "new"), rounded)
    save(tmp_path / "new", *load(folder), dtype=jnp.bfloat16)
    assert equal(stored(tmp_path / "new"), rounded)


def test_a_tree_of_dicts_is_saved_as_well(llama, tmp_path):
    config, params = load(llama[0])
    save(tmp_path / "new", config, nnx.to_pure_dict(params))
    assert equal(stored(tmp_path / "new"), llama[1])


# ---------------------------------------------------------------------------------- where it goes


def test_parameters_are_placed_as_asked_for(llama, tmp_path):
    folder, tensors = llama
    config, _ = load(folder)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def columns(leaf):
        return NamedSharding(mesh, P(None, "fsdp") if leaf.ndim == 2 else P())

    shardings = jax.tree.map(columns, abstract_params(config))
    by_name = dict(named_leaves(shardings))
    for given in (shardings, by_name.__getitem__):
        _, params = load(folder, shardings=given)
        for name, leaf in named_leaves(params):
            assert leaf.sharding == by_name[name]
            hf_name = checkpoint.hf_name(name, "llama")
            np.testing.assert_array_equal(leaf, tensors[hf_name])
    save(tmp_path / "new", config, params)
    assert equal(stored(tmp_path / "new"), tensors)

    everywhere = NamedSharding(mesh, P())
    _, params = load(folder, shardings=everywhere)
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {everywhere}


def test_only_the_parts_of_a_sharding_are_read(llama, monkeypatch):
    # No read is larger than what one device holds.
    folder, tensors = llama
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    reads = []
    read = StoredTensor.__getitem__

    def counted(tensor, index):
        reads.append(read(tensor, index).size)
        return read(tensor, index)

    monkeypatch.setattr(StoredTensor, "__getitem__", counted)
    load(folder, shardings=NamedSharding(mesh, P("fsdp")))
    assert sum(reads) == sum(tensor.size for tensor in tensors.values())
    assert max(reads) == max(tensor.size for tensor in tensors.values()) // 8


# ------------------------------------------------------------------------- what files may look like


def test_a_tied_checkpoint_may_store_its_output_layer_too(tmp_path):
    hf = LLAMA | {"tie_word_embeddings": True}
    tensors = oracle.random_tensors(hf)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    oracle.write(
        tmp_path, hf, tensors | table | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    config, params = load(tmp_path)
    save(tmp_path, config, params)
    assert equal(stored(tmp_path), tensors)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_checkpoint_is_read(prefix, tmp_path):
    tensors = oracle.random_tensors(GEMMA)
    renamed = {prefix + name.removeprefix("model."): t for name, t in tensors.items()}
    renamed["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    renamed["model.multi_modal_projector.weight"] = np.ones((2, 2), np.float32)
    whole = {"model_type": "gemma3", "text_config": GEMMA, "vision_config": {"layers": 1}}
    oracle.write(tmp_path / "old", whole, renamed)
    save(tmp_path / "new", *load(tmp_path / "old"))
    assert equal(stored(tmp_path / "new"), tensors)
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["model_type"] == "gemma3_text"


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


def test_a_tensor_in_two_files_is_refused(tmp_path):
    tensors = oracle.random_tensors(LLAMA)
    oracle.write(tmp_path, LLAMA, tensors, files=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    twice = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    save_file(load_file(second) | twice, second)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is in two files"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00003.safetensors"])
def test_a_missing_file_is_named(name, tmp_path):
    oracle.write(tmp_path, LLAMA, oracle.random_tensors(LLAMA), files=3)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(llama):
    (llama[0] / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load(llama[0])


def test_a_file_that_was_cut_off_is_named(llama):
    file = llama[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        load(llama[0])


def test_parameters_that_do_not_fit_are_not_saved(llama, tmp_path):
    config, params = load(llama[0])
    tree = nnx.to_pure_dict(params)
    del tree["norm"]
    tree["head"]["weight"] = jnp.ones((2, 3))
    tree["embedding"]["weight"] = tree["embedding"]["weight"].astype(jnp.int32)
    with pytest.raises(ValueError, match=r"(?s)embedding.*int32.*head.*\(2, 3\).*norm.*missing"):
        save(tmp_path / "new", config, tree)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        save(tmp_path / "new", config, params, shard_bytes=0)


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
    save(tmp_path / "new", *load(folder))
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
    with pytest.raises(
        ValueError, match=rf"/{name} {words}.*Copy or download the checkpoint again"
    ):
        load(tmp_path)


@pytest.mark.parametrize("content", ({}, {"weight_map": []}, {"weight_map": {}}))
def test_an_index_without_a_weight_map_is_refused(content, tmp_path):
    oracle.write(tmp_path, LLAMA, oracle.random_tensors(LLAMA), files=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r'index\.json has "weight_map" .* instead of an object'):
        load(tmp_path)
