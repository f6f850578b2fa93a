"""Islands over a server of S3 on this machine: conditional writes, and a whole run."""

import concurrent.futures
import os

import numpy as np
import pytest

from dynamiq_jax.islands import ObjectStore, history
from tests.islands.test_shards import ends_of_processes
from tests.support.islands import exchanged, joined, same

server = pytest.importorskip("moto.server", reason="make test-s3 installs moto")
s3fs = pytest.importorskip("s3fs", reason="make test-s3 installs s3fs")
pytestmark = [
    pytest.mark.slow,
    # Of botocore and of the server, not of this library.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def url():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        running = server.ThreadedMotoServer(port=0, verbose=False)
        running.start()
        host, port = running.get_host_and_port()
        yield f"http://{host}:{port}"
        running.stop()


def store(url, path) -> ObjectStore:
    """A store with connections of its own."""
    filesystem = s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True)
    filesystem.makedirs("bucket", exist_ok=True)
    return ObjectStore(filesystem, f"bucket/{path}")


def test_of_many_writers_of_a_name_one_succeeds(url):
    stores = [store(url, "race") for _ in range(4)]
    assert stores[0].get("a/0") is None and stores[0].names("a") == []
    written = [os.urandom(1000) for _ in stores]
    for name in range(5):
        with concurrent.futures.ThreadPoolExecutor(len(stores)) as pool:
            won = [*pool.map(lambda s, data, n=name: s.put(f"a/{n}", data), stores, written)]
        assert sum(won) == 1
        assert {s.get(f"a/{name}") for s in stores} == {written[won.index(True)]}
    assert stores[0].names("a") == [str(name) for name in range(5)]
    for name in ("a/3", "a/3", "a/none"):
        stores[0].delete(name)
    assert stores[1].names("a") == ["0", "1", "2", "4"] and stores[1].get("a/3") is None


def test_large_objects_are_written_once(url):
    data = os.urandom(12 * 2**20)  # more than one part of an upload
    one = store(url, "large")
    assert one.put("a", data) and not one.put("a", b"other") and one.get("a") == data


def test_a_run_with_signatures(url):
    transports = {name: store(url, "run") for name in "abc"}
    islands, states = joined(transports, poll=0.05, secret=b"of the run", method="mxfp8")
    for number in range(3):
        states = exchanged(islands, states, [3 * number + i for i in range(3)])
    assert all(same(state[:3], states[0][:3]) for state in states)
    rounds = history(transports["a"], b"of the run")
    assert [len(each.decision.members) for each in rounds[:-1]] == [3, 3, 3]


def test_islands_of_processes_hold_the_bits_of_a_folder(url, tmp_path):
    """Two islands of two processes of two devices each."""
    store(url, "processes")  # makes the bucket
    places = f"{url}/processes", str(tmp_path)
    s3, folder = (ends_of_processes(place, 2, 2, False) for place in places)
    assert s3[0] == folder[0]
    assert all(np.array_equal(value, folder[1][key]) for key, value in s3[1].items())
