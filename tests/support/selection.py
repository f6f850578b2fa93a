"""Cases that are tried, for a fixture that runs them all at once."""

import pytest


def tried(request: pytest.FixtureRequest, *names: str) -> set[tuple]:
    """Return the values of some parameters in all tests of this file that run and have them."""
    here = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in here if hasattr(item, "callspec")]
    return {tuple(each[name] for name in names) for each in parameters if {*names} <= {*each}}
