"""The folder of compiled programs that runs of the tests share."""

import os
import time

from tests.support import speed


def write(folder, name, size, days_old=0.0):
    path = folder / name
    path.write_bytes(bytes(size))
    written = time.time() - 86400 * days_old
    os.utime(path, (written, written))


def test_old_programs_and_those_beyond_the_limit_are_deleted(tmp_path):
    for name, size, days_old in (("new", 60, 0), ("second", 60, 1), ("old", 1, 15)):
        write(tmp_path, name, size, days_old)
    speed.prune(tmp_path, days=14, most_bytes=200)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "second"}
    speed.prune(tmp_path, days=14, most_bytes=100)
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


def test_processors_of_other_features_have_other_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMIQ_JAX_TEST_CACHE", str(tmp_path))
    here = speed.folder_of_programs()
    assert here == speed.folder_of_programs() and here.parent == tmp_path
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert speed.folder_of_programs() != here
