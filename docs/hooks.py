"""Links from pages to files outside of docs/, on the site as in the repository.

A page is read in two places. In the repository, `../benchmarks/results/error.png` is a file. The
root of the site is docs/, so these hooks add such files to the site at their place in the
repository, and remove the steps out of docs/ from links to them.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
IMAGES = "benchmarks/results/*.png"
NOTEBOOKS = "examples/*.ipynb"

_LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that pages need."""
    for path in [ROOT / page for page in PAGES] + [*sorted(ROOT.glob(IMAGES)), *ROOT.glob(NOTEBOOKS)]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links of the site."""
    folder = posixpath.dirname(page.file.src_uri)
    in_repository = folder if page.file.src_uri in PAGES else posixpath.join("docs", folder)

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(in_repository, link[1]))
        return f"]({posixpath.relpath(target.removeprefix('docs/'), folder or '.')}{link[2]})"

    return _LINK.sub(on_site, markdown)
