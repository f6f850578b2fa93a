"""`dynamiq-jax islands`: what it shows of a run, and errors for what is none."""

import json

import numpy as np
import pytest

from dynamiq_jax._commands.islands import ShowIslands, transport_of
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax.islands import ObjectStore, SharedFolder, history
from tests.support.islands import PARAMS, exchanged, joined, moved, together


@pytest.fixture
def run(tmp_path):
    """A run of two rounds, in the second of which `b` sends NaN."""
    islands, states = joined(SharedFolder(tmp_path), "ab", method="bf16")
    calls = [
        lambda i=i, s=s, n=n: i.exchange(moved(PARAMS, n), s, loss=2.0 + n)
        for n, (i, s) in enumerate(zip(islands, states, strict=True))
    ]
    states = together(calls)
    bad = {name: leaf * np.float32("nan") for name, leaf in PARAMS.items()}
    together(
        [
            lambda: islands[0].exchange(moved(PARAMS, 5), states[0], loss=1.5),
            lambda: islands[1].exchange(bad, states[1]),
        ]
    )
    return tmp_path


def test_it_shows_rounds_and_who_was_left_out_and_why(run, capsys):
    assert ShowIslands(str(run)).run() == 0
    shown = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in shown.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[0][2:4] == ["a", "b"] and rows[0][-1] == "2.5000"
    assert rows[1][2:4] == ["a", "b"] and rows[1][-1] == "1.5000"  # the second one is left out
    assert "it runs" in shown
    assert "round 1: b is left out: its norm is nan: it holds NaN or Inf." in shown


def test_the_file_and_the_plot_have_the_rounds(run, tmp_path):
    files = tmp_path / "rounds.json", tmp_path / "losses.png"
    assert ShowIslands(str(run), last=2, json=files[0], plot=files[1]).run() == 0
    rows = json.loads(files[0].read_text())["results"]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[0]["counted"] == ["a"] and "b" in rows[0]["left_out"]
    assert rows[0]["sizes"]["a"] > 0 and rows[0]["losses"] == {"a": 1.5}
    assert files[1].stat().st_size > 1000


def test_a_decision_that_cannot_be_read_is_shown(run, capsys):
    (run / "decision" / "00000001").write_bytes(b"DQIS" + bytes(40))
    assert ShowIslands(str(run)).run() == 0
    shown = capsys.readouterr().out
    assert "damaged" in shown and "round 1: the checksum" in shown


def test_a_run_with_a_secret_is_read_with_it_alone(tmp_path):
    islands, states = joined(SharedFolder(tmp_path), "a", method="bf16", secret=b"of all")
    exchanged(islands, states, [1])
    folder = SharedFolder(tmp_path)
    (with_secret, _), (without, _) = (history(folder, secret) for secret in (b"of all", None))
    assert with_secret.decision is not None and not with_secret.problem
    assert without.decision is None and "it has a signature" in without.problem


def test_what_is_no_run_is_one_error(tmp_path):
    with pytest.raises(CommandError, match="there is no run of islands"):
        ShowIslands(str(tmp_path)).run()
    with pytest.raises(CommandError, match="is no folder"):
        ShowIslands(str(tmp_path / "none")).run()
    with pytest.raises(CommandError, match="nothing://run"):
        transport_of("nothing://run")
    with pytest.raises(CommandError, match=r"--secret is .*none: No such file"):
        ShowIslands(str(tmp_path), secret=tmp_path / "none").run()


def test_a_store_that_refuses_is_one_error(monkeypatch):
    def refuse(*args, **options):
        raise PermissionError("Access Denied")

    memory = pytest.importorskip("fsspec", reason="URLs need fsspec").filesystem("memory")
    monkeypatch.setattr(type(memory), "ls", refuse)
    with pytest.raises(CommandError, match=r"memory://bucket/run cannot be read: .*Access Denied"):
        ShowIslands("memory://bucket/run").run()


def test_a_url_is_an_object_store():
    pytest.importorskip("fsspec", reason="URLs need fsspec")
    store = transport_of("memory://bucket/run")
    assert isinstance(store, ObjectStore) and store.path.endswith("bucket/run")
