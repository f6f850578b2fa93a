"""Files of earlier releases are read with the values that they had, or refused with a remedy.

`write.py` made them with the code of the release. No release before 0.2.0 had `encode`: messages
of 0.1.0 are the arrays that a worker sends in an all-gather.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.islands._gathered import received
from tests.releases.write import METHODS, PROGRAMS, STEPS, go_on, message, values

# As users compile, like the program that wrote the files: others round in another way.
pytestmark = pytest.mark.optimized

HERE = Path(__file__).parent
RELEASES = sorted(path.name for path in HERE.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name))
OWNER = "worker"


class File(NamedTuple):
    """A state that a release wrote, beside what this version makes."""

    program: Any
    start: Any  # first state of this version
    state: Any  # that of the file: without entries of dictionaries that the file lacks
    result: jax.Array  # of the two steps after, by the code of the release


@pytest.fixture(
    scope="module", params=[(r, name) for r in RELEASES for name in PROGRAMS], ids="-".join
)
def file(request):
    release, name = request.param
    return read(HERE / release / f"state_{name}.npz", PROGRAMS[name]())


def read(path: Path, program: Any) -> File:
    """Read the file of a program."""
    start = program.init(values(0)[0])
    with np.load(path) as loaded:
        arrays = dict(loaded)
    result = arrays.pop("result")
    state = _filled(start, "", arrays)
    assert not arrays, "nothing of the file is left"
    return File(program, start, state, result)


def _filled(like: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """Take arrays by their paths into a tree. Entries that are not there are left out of it."""
    if isinstance(like, Mapping):
        found = {key: _filled(of, f"{path}[{key!r}]", arrays) for key, of in like.items()}
        return {key: of for key, of in found.items() if jax.tree.leaves(of)}
    if hasattr(like, "_fields"):
        return type(like)(
            *(_filled(of, f"{path}.{key}", arrays) for key, of in like._asdict().items())
        )
    if isinstance(like, tuple):
        return tuple(_filled(of, f"{path}[{i}]", arrays) for i, of in enumerate(like))
    return jnp.asarray(arrays.pop(path)) if path in arrays else None


def lacks_owner(tree: Any) -> bool:
    return OWNER not in str(jax.tree.structure(tree))


def test_every_release_has_all_files():
    assert RELEASES
    for release in RELEASES:
        names = {path.name for path in (HERE / release).iterdir()}
        states = {f"state_{name}.npz" for name in PROGRAMS}
        assert names == states | {f"message_{name}.npz" for name in METHODS}


def with_owner(file: File) -> Any:
    """Follow the remedy of the error."""
    init, state = lambda params: file.start, file.state
    try:
        file.program.step(values(STEPS), state)
    except ValueError as error:
        assert "dynamiq-jax 0.1.0" in str(error)
        remedy = re.search(r"give (state\._replace\(.*\)), or else init\(params\)\.", str(error))
        return eval(remedy[1], {"init": init, "state": state, "params": None})
    return state


def error(result: Any, file: File) -> float:
    return float(dq.vnmse(jnp.asarray(result), jnp.asarray(file.result)))


@pytest.mark.sampled(3)
def test_states_go_on_as_in_the_release(file):
    """After the remedy of the error, if there is one. Rounding may differ between machines."""
    read = with_owner(file)
    assert (read is file.state) == (lacks_owner(file.start) or not lacks_owner(file.state))
    assert error(go_on(file.program, read), file) < 1e-5


@pytest.mark.sampled(3)
def test_states_matter(file):
    """A first state gives another result, so that the law above can fail."""
    has_more = len(jax.tree.leaves(file.state)) > 1  # than the step, which makes the noise
    first = file.start._replace(step=file.state.step) if has_more else file.start
    assert error(go_on(file.program, first), file) > 1e-4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", METHODS)
def test_messages_have_the_same_bytes_and_values(release, name):
    method = METHODS[name]
    with np.load(HERE / release / f"message_{name}.npz") as loaded:
        arrays = dict(loaded)
    decoded = arrays.pop("decoded")
    sent, own = message(method)
    assert len(sent) == len(arrays)
    # Until 0.2.0, payloads had a leading axis of the only chunk.
    before = [arrays[f"sent{n}"].reshape(array.shape) for n, array in enumerate(sent)]
    for old, new in zip(before, sent, strict=True):
        np.testing.assert_array_equal(old, new, strict=True)
    np.testing.assert_array_equal(decoded, own)
    read = received(method, decoded.size, [*map(jnp.asarray, before)])
    np.testing.assert_allclose(read, decoded, rtol=1e-6)
