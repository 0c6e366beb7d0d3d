"""ARCHITECTURE.md names files and folders that exist, docs/cli.md is what the program says today, and links lead on."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_path_that_the_architecture_names_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {path for path in re.findall(r"`([\w/.]+)`", text) if "/" in path and not path.startswith("org/")}
    assert len(named) > 30
    assert [path for path in named if not ((ROOT / path).exists() or (ROOT / "bigload" / path).exists())] == []


def test_the_page_of_the_command_line_is_up_to_date():
    command = [sys.executable, ROOT / "docs" / "generate.py"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "cli.md").read_text() == made, "run: make docs"


def test_the_man_page_is_up_to_date_and_has_every_verb():
    command = [sys.executable, ROOT / "docs" / "generate.py", "--man"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "bigload.1").read_text() == made, "run: make docs"
    assert ".SH BIGLOAD PLAN\n" in made


def test_every_link_of_the_documents_leads_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", document.read_text()):
            target = document.parent / link if link else document
            if target.parent.name == "api" or target.name == "api.md":  # made for the site alone; its build checks
                continue
            assert target.exists(), (document.name, link)
            assert not anchor or anchor in anchors_of(target), (document.name, link, anchor)


def anchors_of(document):
    """Return the anchors of headings, as GitHub and the site name them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
