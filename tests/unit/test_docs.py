"""What the documents show runs, and what they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_example_runs():
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert snippets
    for code in snippets:
        exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(doc):
    for target in re.findall(r"\]\(([^)#:]+)\)", doc.read_text()):
        assert (doc.parent / target).exists(), target


def test_map_of_the_code_names_what_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:src|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
