"""`benchmarks.error.paper_tables`: its tables of single layers."""

import json

import numpy as np
import pytest

from benchmarks.error import paper_tables
from benchmarks.error.paper_tables import layers

RANDOM = np.random.default_rng(0)
GRADIENTS = {
    name: RANDOM.standard_normal((2, 4, 256), np.float32)
    for name in ("embed_tokens", "layers.5.attn.q", "layers.5.mlp.up", "layers.25.attn.q")
}


def test_layers_keep_their_arrays_under_names_that_are_alike():
    parts = layers(GRADIENTS)
    assert list(parts) == ["embedding", "layer 5", "layer 25"]
    assert list(parts["layer 5"]) == ["layer.attn.q", "layer.mlp.up"]
    assert parts["layer 25"]["layer.attn.q"] is GRADIENTS["layers.25.attn.q"]
    assert sum(map(len, parts.values())) == len(GRADIENTS)
    with pytest.raises(SystemExit, match=r"--by-layer: no array has a name such as layers\.0"):
        layers({"w": GRADIENTS["embed_tokens"]})


@pytest.mark.slow
def test_each_layer_is_summed_alone_and_equal_ones_are_compiled_once(tmp_path, monkeypatch):
    """Layers of equal values have equal errors, although other layers are between."""
    equal = {f"layers.{layer}.mlp.up": GRADIENTS["layers.5.mlp.up"] for layer in (0, 2)}
    np.savez(tmp_path / "g.npz", **equal | {"layers.1.mlp.up": 3 * GRADIENTS["embed_tokens"]})
    compiled = []

    class Counted(paper_tables.Simulation):
        def __init__(self, *arguments):
            compiled.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(paper_tables, "Simulation", Counted)
    monkeypatch.setattr(paper_tables, "make_devices", lambda workers: None)
    cases = (("Table 3: methods", "MXFP4", "mxfp4:ring", 2, 0.1),)
    monkeypatch.setattr(paper_tables, "CASES", cases)
    options = {"gradients": tmp_path / "g.npz", "output": tmp_path / "out.json", "workers": 2}
    paper_tables.main(paper_tables.Config(**options, by_layer=True))
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    first, other, same = (row["vnmse"][f"layer {layer}"] for layer in (0, 1, 2))
    assert first == same != other
    assert 0.001 < min(first, other) < row["mean"] < max(first, other) < 0.1
    assert len(compiled) == 1
    paper_tables.main(paper_tables.Config(**options))
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(row["vnmse"]) == [""]
