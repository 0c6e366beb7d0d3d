"""The site has every document once and every public name once, and builds without a dead link."""

import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

import bigload

ROOT = Path(__file__).parents[2]
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]


def site_pages():
    found = util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    module = util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_navigation_has_every_document_once():
    listed = re.findall(r"([\w./-]+\.md)$", NAV, re.MULTILINE)
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    repository = ["index.md", *(path.name for path in ROOT.glob("*.md") if path.name != "README.md")]
    assert len(set(listed)) == len(listed)
    assert {*pages, *repository} - set(listed) == set()


def test_the_reference_has_every_public_name_once():
    script = site_pages()
    named = [name for page in script.API for name in script.names_of(page)]
    assert sorted(named) == sorted({*bigload._MODULE_OF, *script.TRANSFORMERS})
    assert all(hasattr(bigload.transformers, name.removeprefix("transformers.")) for name in script.TRANSFORMERS)


def test_links_of_the_repository_lead_to_pages_of_the_site():
    script = site_pages()
    assert script.site_path("README.md") == "index.md"
    assert script.site_path("docs/cli.md") == "cli.md"
    assert script.site_path("benchmarks/results") == "benchmarks/README.md"
    assert script.repository_path("cli.md") == "docs/cli.md"
    assert script.repository_path("SECURITY.md") == "SECURITY.md"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert 'id="bigload.errors.BigloadError"' in (tmp_path / "site" / "api" / "errors.html").read_text()
    scripts = {
        script
        for page in (tmp_path / "site").rglob("*.html")
        for script in re.findall(r'<script[^>]* src="?([^" >]+)', page.read_text())
    }
    assert [script for script in scripts if ":" in script] == []  # nothing of other hosts
