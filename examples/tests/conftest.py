"""Set-up of the tests of examples."""

import jax
import pytest

from examples.tests.support import llm_files


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax and `jax.nn.dot_product_attention` rely on it, and the tests forbid it elsewhere."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint and chats."""
    folder = tmp_path_factory.mktemp("llm")
    llm_files.write(folder)
    return folder
