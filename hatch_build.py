"""Build hook that compiles the native codec into a wheel, or an editable installation.

Where that is not possible, such as without a C++ compiler, the wheel is pure Python, and the reason
is printed. `DYNAMIQ_NATIVE=0` asks for such a wheel, and `DYNAMIQ_NATIVE=1` makes the reason an
error. At run time, `DYNAMIQ_NATIVE=0` switches a codec off that is there.
"""

import shutil
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What values of `DYNAMIQ_NATIVE` mean to a build.
_VALUES = "Give 0 for a wheel without the native codec, or 1 for an error if it does not compile."
# The oldest one that the package supports: XLA refuses calls that were compiled for a later one.
_HEADERS = "jaxlib>=0.10,<0.11"
_PYTHONS = (3, 11), (3, 14)  # that it has wheels for


class NativeCodec(BuildHookInterface):
    """Hook of hatchling."""

    def dependencies(self) -> list[str]:
        """Return what a build in an environment of its own has to install."""
        build = _build_module(self.root)
        has_headers = _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]
        is_wanted = build.switch(_VALUES) != "0"
        try:
            return [_HEADERS] if is_wanted and has_headers and build.compiler() else []
        except build.CannotCompileError:
            return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the codec, and mark the wheel as one for this platform."""
        build = _build_module(self.root)
        library = Path("pallas_kernels", "_native", build.LIBRARY)
        # An editable installation has it beside the sources.
        made = Path(self.root if version == "editable" else self.directory, library)
        try:
            if build.switch(_VALUES) == "0":
                raise build.CannotCompileError(f"{build.SWITCH}=0")
            build.compiler()
            made.parent.mkdir(parents=True, exist_ok=True)
            build.compile_library(made, build.include_directory())
        except build.CannotCompileError as error:
            if build.switch(_VALUES) == "1":
                raise
            self.app.display_warning(f"Without the native codec: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(made)] = str(library)
        build_data["pure_python"] = False
        # Of any Python: the library is loaded by `ctypes`.
        of_platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{of_platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the library beside the wheel that holds it."""
        if version != "editable":
            shutil.rmtree(Path(self.directory, "pallas_kernels"), ignore_errors=True)


def _build_module(root: str) -> Any:
    """Load `pallas_kernels/_native/build.py` by its path: the package needs JAX."""
    spec = spec_from_file_location(
        "native_build", Path(root, "pallas_kernels", "_native", "build.py")
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
