"""The benchmark of errors by row, on few rows."""

import json

import numpy as np
import pytest

from benchmarks.error import rows
from tests.support.commands import shown


def test_each_case_is_measured_once(tmp_path, monkeypatch):
    """With codes of 2 bits, the smallest vector and small rows of the matrix are noise."""
    random = np.random.default_rng(0)
    leaf = random.normal(size=(2, 96, 256)) * np.repeat([1.0, 1e-4, 1e-4], 32)[:, None]
    np.savez(tmp_path / "g.npz", **{"model.layers.0.mlp.up": leaf.astype(np.float32)})
    monkeypatch.setattr(rows, "make_devices", lambda workers: None)
    config = rows.Config(
        gradients=tmp_path / "g.npz",
        bits=(5.0,),
        topologies=("ring",),
        bucketings=("striped",),
        workers=(2,),
        drawn=(),
        output=tmp_path / "rows.json",
    )
    monkeypatch.setattr(rows, "OTHERS", ())
    rows.main(config)
    ours, from_2 = json.loads(config.output.read_text())["results"]
    assert (ours["least"], ours["width"], from_2["width"]) == (None, 3, 2)
    assert ours["above_half"] == 0 < 0.3 < from_2["worse_than_zero"] <= from_2["above_half"] < 1
    assert 1e-5 < from_2["vnmse"] < ours["vnmse"] < 1e-2
    kinds = {"mlp", *rows.VECTORS}
    assert set(ours["of_kind"]) == kinds
    assert ours["of_kind"]["vector at 0.01"]["worst"] < 0.5 < from_2["worst"]
    assert "worse than zero" in shown(rows.as_table([ours, from_2]))
    before = config.output.read_bytes()
    monkeypatch.setattr(rows, "measured", None)  # not needed again
    rows.main(config)
    assert json.loads(before)["results"] == json.loads(config.output.read_text())["results"]


def test_errors_of_leaves_add_up():
    rng = np.random.default_rng(1)
    truth = rng.normal(size=512)
    whole = rows.errors_of([(truth * 1.5, truth)])
    parts = rows.errors_of([(truth[:256] * 1.5, truth[:256]), (truth[256:] * 1.5, truth[256:])])
    assert whole == pytest.approx(parts)
    assert whole["vnmse"] == pytest.approx(0.25) == whole["worst"]
    assert (whole["above_half"], whole["worse_than_zero"]) == (0, 0)
    assert rows.errors_of([(truth * 2.1, truth)])["worse_than_zero"] == 1
