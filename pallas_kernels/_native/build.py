"""Compilation of the native codec; imports nothing but the standard library.

    python pallas_kernels/_native/build.py

compiles it beside this file, as the build of the package does. `CXX` names the compiler.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "libdynamiq_native.so"
SWITCH = "DYNAMIQ_NATIVE"  # environment variable of a build, and of a process
SOURCES = Path(__file__).parent / "src"
_PATIENCE = 600.0  # seconds for one file

# Every product and sum rounds by itself, except in calls of `fma`: XLA:CPU compiles the base so.
# The others let the compiler vectorize square roots and selections.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
# Name of an instruction set, as a namespace of the source, to its flags.
_INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx2": _AVX2, "avx512": (*_AVX2, *_AVX512)},
    "aarch64": {"neon": ()},
}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


class CannotCompileError(Exception):
    """The reason why there is no native codec."""


def switch(remedy: str) -> str:
    """Return the value of the environment variable `SWITCH`: empty, 0 or 1.

    Raises:
      ValueError: it has another value; the message ends with the remedy.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={value!r} is not possible. {remedy}")
    return value


def machine() -> str:
    """Return the architecture to compile for, such as `x86_64`."""
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


def compiler() -> list[str]:
    """Return the command of the C++ compiler.

    Raises:
      CannotCompileError: there is none, or the source is not for this machine.
    """
    if sys.platform not in ("linux", "darwin"):
        raise CannotCompileError(f"the native codec is not for {sys.platform}")
    if machine() not in _INSTRUCTION_SETS:
        raise CannotCompileError(f"the native codec has no instructions for {machine()}")
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise CannotCompileError("there is no C++ compiler (c++, g++, clang++ or CXX)")


def include_directory() -> Path:
    """Return the headers of XLA's foreign function interface, which jaxlib has.

    Raises:
      CannotCompileError: jaxlib is not installed.
    """
    found = find_spec("jaxlib")
    if found is None or found.origin is None:
        raise CannotCompileError("jaxlib is not installed, which has the headers of XLA")
    return Path(found.origin).parent / "include"


def sources_digest() -> str:
    """Return a digest of the sources, which the library holds too.

    Raises:
      OSError: a source cannot be read, or there is none.
    """
    digest = hashlib.sha256()
    # Other files may lie beside them, such as those of a desktop or an editor.
    sources = sorted(path for path in SOURCES.glob("*") if path.suffix in (".cc", ".h"))
    if not sources:
        raise OSError(f"there are no sources in {SOURCES}")
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_library(target: Path, include: Path) -> None:
    """Compile the native codec to a shared library, with the headers of jaxlib.

    Raises:
      CannotCompileError: there is no compiler, or it failed.
    """
    # As headers of a system, they give no warnings.
    of_calls = ("-isystem", str(include), f'-DDYNAMIQ_SOURCES="{sources_digest()}"')
    names = ("calls.cc", "block_calls.cc", "sparse_calls.cc", "copies.cc")
    calls = tuple(SOURCES / name for name in names)
    compile_with_rows(target, calls, of_calls, ("-shared",))


def compile_with_rows(
    target: Path,
    mains: tuple[Path, ...],
    of_mains: tuple[str, ...],
    of_linker: tuple[str, ...],
    flags: tuple[str, ...] = (),
) -> None:
    """Compile sources and the rows of all instruction sets, and link them to a file.

    There are flags for the sources, for the linker, and for everything.

    Raises:
      CannotCompileError: there is no compiler, or it failed.
    """
    command = [*compiler(), *_FLAGS, *flags]
    with tempfile.TemporaryDirectory() as folder:
        to_compile = {f"{main.stem}.o": [*of_mains, str(main)] for main in mains}
        for name, of_set in _INSTRUCTION_SETS[machine()].items():
            rows = str(SOURCES / "rows.cc")
            to_compile[f"{name}.o"] = [*of_set, f"-DDYNAMIQ_ISA={name}", rows]
        objects = [str(Path(folder, name)) for name in to_compile]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = (
                [*command, *source, "-c", "-o", made]
                for source, made in zip(to_compile.values(), objects, strict=True)
            )
            list(pool.map(_run, commands))
        # Under another name first: a process may have loaded the file that is there.
        linked = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            _run([*command, *of_linker, *objects, "-o", str(linked)])
            linked.replace(target)
        finally:
            linked.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompileError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise CannotCompileError(f"{shlex.join(command)} failed: {done.stderr.strip()}")


if __name__ == "__main__":
    try:
        compile_library(Path(__file__).with_name(LIBRARY), include_directory())
    except CannotCompileError as error:
        sys.exit(f"{error}")
