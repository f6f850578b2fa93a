"""The fixtures and settings of all tests: see tests/plugin.py."""

import importlib.util

# Shapes and dtypes in the annotations of the codec are checked wherever a test calls it, but in the
# environments of third-party trainers.
if all(importlib.util.find_spec(name) for name in ("beartype", "jaxtyping")):
    from jaxtyping import install_import_hook

    from tests.support import shapes

    install_import_hook("pallas_kernels.codec", f"{shapes.__name__}.check")

pytest_plugins = ("tests.plugin",)
