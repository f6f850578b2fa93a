"""Part of the changelog of a release, for its tag.

python -m docs.scripts.release_notes v0.2.0
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def notes_of(tag: str) -> str:
    """Return the part of the changelog of a tag.

    Raises:
      ValueError: the tag is not that of this version, or the changelog has no such part.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"The tag is {tag!r}, but the version is {version}: tag v{version}.")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    pattern = rf"^## \[{re.escape(version)}\] - \S+\n(.*?)(?=^## |\Z)"
    part = re.search(pattern, changelog, re.DOTALL | re.MULTILINE)
    if part is None:
        raise ValueError(f"CHANGELOG.md has no part [{version}] with a date. Write one.")
    return part[1].strip() + "\n"


if __name__ == "__main__":
    print(notes_of(sys.argv[1]), end="")
