"""The mesh of most steps here."""

import pytest


@pytest.fixture
def mesh(data_mesh):
    return data_mesh(2)
