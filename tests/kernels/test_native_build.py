"""The native codec is compiled where that is possible, and its absence has a reason."""

import shutil
from pathlib import Path

import pytest

from pallas_kernels import choice
from pallas_kernels._native import build, library


@pytest.fixture
def fresh(monkeypatch):
    """`library.why_not`, as in a process that did not call it yet."""
    monkeypatch.setattr(library, "why_not", library.why_not.__wrapped__)
    return library.why_not


def test_without_the_library_its_name_is_refused_with_the_reason(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "PATH", tmp_path / build.LIBRARY)
    assert "was not compiled when the package was built" in fresh()
    monkeypatch.setattr(library, "why_not", fresh)
    with pytest.raises(ValueError, match=r"implementation='native' cannot run here: .*compiler"):
        choice.check("native")
    library.PATH.write_bytes(b"no library")
    assert f"{build.LIBRARY} does not load" in fresh()


compiled = pytest.mark.skipif(not library.PATH.exists(), reason="no native codec is compiled here")


@compiled
def test_sources_that_are_others_or_not_there_are_a_reason(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert f"does not load: there are no sources in {tmp_path}" in fresh()
    monkeypatch.setattr(library, "sources_digest", lambda: "0" * 16)
    assert "was compiled from other sources: install the package again" in fresh()


def test_every_file_of_the_sources_changes_their_digest(tmp_path, monkeypatch):
    sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, sources)
    digests = [build.sources_digest()]
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.sources_digest() == digests[0]
    for path in sources.iterdir():
        path.write_bytes(path.read_bytes() + b"\n")
        digests.append(build.sources_digest())
    assert len({*digests}) == len(digests) > 10
    (sources / ".DS_Store").write_bytes(b"of a desktop")
    (sources / ".idea").mkdir()
    assert build.sources_digest() == digests[-1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(build.sys, "platform", "win32"), "is not for win32"),
        (lambda patch: patch.setattr(build.platform, "machine", lambda: "vax"), "for vax"),
        (lambda patch: patch.setattr(shutil, "which", lambda name: None), "no C\\+\\+ compiler"),
        (lambda patch: patch.setenv("CXX", "/no/compiler"), "/no/compiler .*No such file"),
        (lambda patch: patch.setenv("CXX", "false"), "false .* failed"),
    ],
)
def test_what_cannot_be_compiled_has_a_reason(change, reason, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    change(monkeypatch)
    with pytest.raises(build.CannotCompileError, match=reason):
        build.compile_library(tmp_path / build.LIBRARY, Path("include"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("here", [("c++", "g++", "clang++"), ("g++", "clang++"), ("clang++",)])
def test_the_first_compiler_that_is_there_is_taken_but_for_a_named_one(here, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setattr(build, "machine", lambda: "x86_64")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in here else None)
    assert build.compiler() == [f"/bin/{here[0]}"]
    monkeypatch.setenv("CXX", "ccache g++ -m64")
    assert build.compiler() == ["ccache", "g++", "-m64"]
