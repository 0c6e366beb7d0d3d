"""Pages of the site that are not files of docs/: those of the repository, and the API reference. A hook of mkdocs.

Links between documents are those of the repository, where they work too; on the site they lead to its pages.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import bigload  # noqa: E402 - this tree's, whatever is installed

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY_PAGES = ("*.md", "benchmarks/*.md", "benchmarks/results/*.md", "LICENSE")

UNSEARCHED = ("benchmarks/", "CHANGELOG", "ARCHITECTURE", "CONTRIBUTING", "releasing", "scale")
"""Beginnings of pages that are no answer to what a user asks; those of the reference are the last ones."""

API = {
    "checkpoints": ("Checkpoints", ("bigload.checkpoint", "bigload.devices", "bigload.dtypes")),
    "plans": ("Plans", ("bigload.planning",)),
    "layouts": ("Layouts on disk", ("bigload.layouts",)),
    "loading": ("Loading", ("bigload.loading",)),
    "runtime": ("Running offloaded models", ("bigload.runtime",)),
    "workers": ("Ranks and workers", ("bigload.parallel",)),
    "processes": ("Deferred execution", ("bigload.distributed",)),
    "measuring": ("Measuring", ("bigload.bench",)),
    "errors": ("Errors", ("bigload.errors",)),
}
"""By name of a page: its title, and the packages whose public names it has."""

TRANSFORMERS = {"transformers.from_pretrained", "transformers.reading_with_bigload"}
"""Public names that `bigload` has in a module of their own."""

_LINK = re.compile(r"(\]\()([^)#:\s]*)((?:#[^)\s]*)?\))")


def names_of(page: str) -> dict[str, str]:
    """Return the public names on a page of the reference, and where each is defined."""
    packages = API[page][1]
    found = {
        name: f"{module}.{name}"
        for module, names in bigload._MODULES.items()
        for name in names.split()
        if module.startswith(tuple(f"{package}." for package in packages)) or module in packages
    }
    if page == "loading":
        found |= {name: f"bigload.{name}" for name in TRANSFORMERS}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def reference() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page of the reference."""
    rows = [f"| [{title}](api/{page}.md) | {_listed(page)} |" for page, (title, _) in API.items()]
    yield "api.md", "\n".join(["# Public names", "", "| page | `bigload.` |", "|---|---|", *rows, ""])
    for page, (title, _) in API.items():
        entries = [
            f"::: {path}\n    options:\n      heading: bigload.{name}\n      toc_label: {name}\n"
            for name, path in names_of(page).items()
        ]
        yield f"api/{page}.md", "\n".join([f"# {title}", "", *entries])


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site: "docs/cli.md" is `cli.md`, "README.md" is `index.md`."""
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        return "benchmarks/README.md"
    return path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    if path == "index.md":
        return "README.md"
    return path if any(each.as_posix() == path for each in _repository_pages()) else f"docs/{path}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the tests read this module without mkdocs

    for path in _repository_pages():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, site_path(path.as_posix()), content=text))
    for name, text in reference():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links of the repository into links of the site."""
    source = page.file.src_uri
    page.meta["search"] = (
        {"exclude": True} if source.startswith(UNSEARCHED) else {"boost": 0.2 if source.startswith("api") else 1}
    )
    here, folder = posixpath.dirname(source), posixpath.dirname(repository_path(source))
    if source.startswith("api"):
        return markdown

    def moved(link: re.Match[str]) -> str:
        before, path, after = link.groups()
        if not path:
            return link[0]
        target = site_path(posixpath.normpath(posixpath.join(folder, path)))
        return f"{before}{os.path.relpath(target, here or '.')}{after}"

    return _LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Replace the script that the theme takes from another host by one of the site."""
    for page in Path(config.site_dir).rglob("*.html"):
        own = os.path.relpath(Path(config.site_dir) / "search_frame.js", page.parent)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("https://unpkg.com/iframe-worker/shim", own), encoding="utf-8")


def _listed(page: str) -> str:
    return ", ".join(f"[`{name}`](api/{page}.md#{path})" for name, path in names_of(page).items())


def _repository_pages() -> list[Path]:
    return sorted(path.relative_to(ROOT) for pattern in REPOSITORY_PAGES for path in ROOT.glob(pattern))
