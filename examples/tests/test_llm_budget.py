"""Memory, disk and time of training are known before it starts."""

import shutil
from types import SimpleNamespace

import pytest

from examples.tests.support import llm_files
from examples.tools import budget

GIB = 2**30


def test_donated_arguments_of_a_step_count_once():
    sizes = {"argument": 3, "temp": 2, "output": 4, "alias": 3}
    sizes = SimpleNamespace(**{f"{kind}_size_in_bytes": size for kind, size in sizes.items()})
    assert budget.bytes_of_step(SimpleNamespace(memory_analysis=lambda: sizes), 1) == 6
    assert budget.bytes_of_step(SimpleNamespace(memory_analysis=lambda: None), 1) == 1


def test_a_step_that_cannot_fit_is_refused(monkeypatch):
    """Virtual devices share the memory of the machine."""
    mesh, step = llm_files.mesh_of(2, 2), 6 * GIB
    monkeypatch.setattr(budget, "free_memory", lambda: 27 * GIB)
    assert budget.check_memory(step, mesh).startswith("needs 26.5 GiB of memory; this machine has")
    monkeypatch.setattr(budget, "free_memory", lambda: 25 * GIB)
    with pytest.raises(ValueError, match=r"--workers 2 needs 26.5 GiB .* has 25.0 GiB free. Give"):
        budget.check_memory(step, mesh)
    monkeypatch.setattr(budget, "free_memory", lambda: None)
    assert budget.check_memory(step, mesh) == "needs 26.5 GiB of memory"


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    """Also for a folder that does not exist yet."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * GIB))
    folder = tmp_path / "a" / "b"
    assert budget.check_disk(folder, 3 * GIB) == "3.0 GiB of disk"
    with pytest.raises(ValueError, match=r".*/a/b will take 4.0 .* has 3.0 GiB f"):
        budget.check_disk(folder, 4 * GIB)
