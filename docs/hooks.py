"""Lets pages link to files outside of docs/ as they do in the repository.

Pages are read in two places: in the repository, where `../benchmarks/results/error.png` is a file,
and on the site, whose root is docs/. The files that pages need from elsewhere join the site at
their place in the repository, and links to them lose the steps out of docs/.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
IMAGES = "benchmarks/results/*.png"

_LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds what lies outside of docs/."""
    for path in [ROOT / page for page in PAGES] + sorted(ROOT.glob(IMAGES)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links from file to file in the repository into links on the site."""
    folder = posixpath.dirname(page.file.src_uri)
    in_repository = folder if page.file.src_uri in PAGES else posixpath.join("docs", folder)

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(in_repository, link[1]))
        return f"]({posixpath.relpath(target.removeprefix('docs/'), folder or '.')}{link[2]})"

    return _LINK.sub(on_site, markdown)
