"""Links from pages to files outside of docs/, on the site as in the repository.

A page is read in two places. In the repository, `../benchmarks/results/error.png` is a file. The
root of the site is docs/, so these hooks add such files to the site at their place in the
repository, and remove the steps out of docs/ from links to them. The README becomes the home page,
and the notebook a page.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "research/README.md")
IMAGES = "**/benchmarks/results/*.png"
README, HOME = "README.md", "index.md"
NOTEBOOK = "examples/first_compressed_step.ipynb"
NOTEBOOK_PAGE = NOTEBOOK.replace(".ipynb", ".md")

_LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that pages need."""
    for path in [ROOT / page for page in PAGES] + sorted(ROOT.glob(IMAGES)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / README)))
    text, resources = MarkdownExporter().from_filename(str(ROOT / NOTEBOOK))
    files.append(File.generated(config, NOTEBOOK_PAGE, content=text))
    for name, image in resources["outputs"].items():
        name = posixpath.join(posixpath.dirname(NOTEBOOK), name)
        files.append(File.generated(config, name, content=image))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links of the site."""
    folder = posixpath.dirname(page.file.src_uri)
    outside = page.file.src_uri in (*PAGES, HOME, NOTEBOOK_PAGE)
    in_repository = folder if outside else posixpath.join("docs", folder)

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(in_repository, link[1]))
        target = target.removeprefix("docs/")
        target = {NOTEBOOK: NOTEBOOK_PAGE, README: HOME}.get(target, target)
        return f"]({posixpath.relpath(target, folder or '.')}{link[2]})"

    return _LINK.sub(on_site, markdown)
