"""Installation into fresh environments, and what runs there.

    make environments
    python -m benchmarks.environments --pythons 3.12 --jax newest --packages wheel

Each environment is made in the temporary folder, away from the sources, from the wheel or the
source distribution in dist/. There run the code of the README, `dynamiq-jax verify`, the notebook,
and the code of recipes. Rows of the result file that this run does not make again are kept.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._console.errors import CommandError

ROOT = Path(__file__).parents[1]
NAME = "fresh_environments"
OLDEST = "0.10.0"  # version of JAX
EXTRA = "notebook"  # which brings the command line and flax
RECIPES = ("flax_linen", "flax_nnx", "optax")
KEY = ("python", "jax", "package")
_PATIENCE = 1800.0  # seconds of one program
_NOTEBOOK = """
import nbformat, nbclient
notebook = nbformat.read("notebook.ipynb", as_version=4)
nbclient.NotebookClient(notebook, timeout=1200).execute()
"""
_VERSIONS = """
import platform, jax, dynamiq_jax
from pallas_kernels import operations
print(platform.python_version(), jax.__version__, dynamiq_jax.__version__, sep="\\n")
print(operations.default_backend())
"""
Package = Literal["wheel", "sdist", "sdist without a compiler"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    pythons: tuple[str, ...] = ("3.11", "3.12", "3.13")  # found on the path, or of pyenv
    jax: tuple[Literal["oldest", "newest"], ...] = ("oldest", "newest")
    packages: tuple[Package, ...] = ("wheel", "sdist", "sdist without a compiler")
    dist: Path = ROOT / "dist"  # folder of both packages, which `make build` fills
    save: bool = True  # write the result to benchmarks/results/fresh_environments.json


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment, and the folder in which its programs run."""

    folder: Path
    variables: dict[str, str]

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / ".venv" / "bin" / "python"

    def call(self, *words: str | Path) -> str:
        """Run a program of the environment, and return what it prints.

        Raises:
          subprocess.CalledProcessError: it failed.
        """
        command = [self.python.parent / words[0], *words[1:]]
        finished = subprocess.run(
            command,
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
        return finished.stdout

    def size(self) -> int:
        """Return the bytes of all installed files."""
        return sum(p.stat().st_size for p in self.folder.glob(".venv/lib/**/*") if p.is_file())


def code_of(page: str) -> str:
    """Return the Python of a page, in order."""
    text = (ROOT / page).read_text()
    return "".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))


def interpreter(version: str) -> Path:
    """Return the interpreter of a version of Python.

    Raises:
      CommandError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    for candidate in filter(None, found):
        asked = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if asked.returncode == 0 and f" {version}." in asked.stdout:
            return Path(candidate)
    raise CommandError(f"--pythons: there is no Python {version}. Install it, or leave it out.")


def package_file(dist: Path, package: Package) -> Path:
    """Return the file of a package.

    Raises:
      CommandError: the folder has none, or several.
    """
    found = sorted(dist.glob("*.whl" if package == "wheel" else "*.tar.gz"))
    if len(found) != 1:
        raise CommandError(
            f"--dist is {dist}, with {len(found)} files for {package!r}. Empty it, and run "
            "`make build`."
        )
    return found[0]


def try_out(folder: Path, version: str, jax: str, package: Package, file: Path) -> dict[str, Any]:
    """Make one environment, run everything there, and return the row of the table."""
    row: dict[str, Any] = {"python": version, "jax": jax, "package": package}
    variables = {k: v for k, v in os.environ.items() if not re.match("JAX|XLA|PYTHON|DYNAMIQ", k)}
    if package == "sdist without a compiler":
        variables |= dict.fromkeys(("CC", "CXX"), "/bin/false")
    environment = Environment(folder, variables | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"})
    subprocess.run([interpreter(version), "-m", "venv", folder / ".venv"], check=True)
    before = environment.size()
    pins = [f"{name}=={OLDEST}" for name in ("jax", "jaxlib")] if jax == "oldest" else []
    pages = {"README": "README.md"} | {name: f"docs/recipes/{name}.md" for name in RECIPES}
    for name, page in pages.items():  # not optax.py, which would hide optax
        (folder / f"{name}_code.py").write_text(code_of(page))
    shutil.copy(ROOT / "examples" / "first_compressed_step.ipynb", folder / "notebook.ipynb")
    eight = Environment(folder, environment.variables | {"JAX_NUM_CPU_DEVICES": "8"})

    def measure(name: str, action: Callable[[], Any]) -> bool:
        start = time.perf_counter()
        try:
            action()
        except subprocess.SubprocessError as error:
            stderr = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
            text = str(stderr).replace(str(folder), ".")
            row.setdefault("failed", {})[name] = text[-1500:]
            print(f"  {name} failed: {str(stderr)[-300:]}", file=sys.stderr, flush=True)
            return False
        row[name] = time.perf_counter() - start
        print(f"  {name} {row[name]:.0f} s", file=sys.stderr, flush=True)
        return True

    def install(what: str) -> bool:
        return measure(f"install {what}".strip(), lambda: environment.call(
            "python", "-m", "pip", "install", "--quiet", f"{file}{what}", *pins
        ))  # fmt: skip

    print(f"Python {version}, {jax} JAX, {package}", file=sys.stderr, flush=True)
    if not install(""):
        return row
    row["bytes"] = environment.size() - before
    *versions, codec = environment.call("python", "-c", _VERSIONS).splitlines()
    row["versions"] = dict(zip(("python", "jax", "dynamiq-jax"), versions, strict=True))
    row["codec"] = "native" if "by 'native'" in codec else "xla"
    measure("pip check", lambda: environment.call("python", "-m", "pip", "check"))
    measure("README", lambda: environment.call("python", "README_code.py"))
    if not install(f"[{EXTRA}]"):
        return row
    row["all bytes"] = environment.size() - before
    measure("pip check of all", lambda: environment.call("python", "-m", "pip", "check"))
    measure("verify", lambda: environment.call("dynamiq-jax", "verify"))
    measure("notebook", lambda: environment.call("python", "-c", _NOTEBOOK))
    for name in RECIPES:
        measure(name, lambda name=name: eight.call("python", f"{name}_code.py"))
    return row


RUNS = ("pip check", "README", "pip check of all", "verify", "notebook", *RECIPES)


def outcome(row: dict[str, Any]) -> str:
    """Return what ran in an environment."""
    missing = [name for name in RUNS if name not in row]
    return f"all but {', '.join(missing)}" if missing else "all"


COLUMNS = (
    Column("Python", ("versions", "python")),
    Column("JAX", ("versions", "jax")),
    Column("package", "package"),
    Column("codec", "codec"),
    Column("ran", outcome),
    Column("pip install", "install", "{:.0f} s"),
    Column("MB", lambda row: row["bytes"] / 1e6, "{:.0f}"),
    Column(f"MB with [{EXTRA}]", lambda row: row["all bytes"] / 1e6, "{:.0f}"),
)


@benchmark(NAME)
def main(config: Config) -> Iterator[Report]:
    """Try all environments, one after the other."""
    path = files.path_of(NAME)
    rows = json.loads(path.read_text())["results"] if config.save and path.exists() else []
    cases = [(v, j, p) for v in config.pythons for j in config.jax for p in config.packages]
    found = [package_file(config.dist, package) for *_, package in cases]
    for (version, jax, package), file in zip(cases, found, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            row = try_out(Path(folder), version, jax, package, file) | files.stamp()
        key = [row[name] for name in KEY]
        rows = [other for other in rows if [other[name] for name in KEY] != key] + [row]
        rows.sort(key=lambda row: tuple(row[name] for name in KEY))
        complete = [row for row in rows if "all bytes" in row]
        yield Report(
            results=rows,
            shown=[table("Fresh environments", COLUMNS, complete)],
            options=files.options_of(config, but=("save", "dist", "pythons", "jax", "packages")),
            status=int(any("failed" in row for row in rows)),
        )


if __name__ == "__main__":
    run(main, __doc__)
