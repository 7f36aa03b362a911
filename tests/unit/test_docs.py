"""What the documents show runs, what they name exists, and what is generated is up to date."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


SNIPPETS = [
    pytest.param(code, id=f"{doc.name}-{i}")
    for doc in DOCS
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", doc.read_text(), re.S))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_example_runs(code):
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_readme_has_an_example():
    assert "```python" in (ROOT / "README.md").read_text()


def test_support_tables_are_up_to_date():
    command = [sys.executable, str(ROOT / "tools" / "support_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(doc):
    for target in re.findall(r"\]\(([^)#:]+)\)", doc.read_text()):
        assert (doc.parent / target).exists(), target


def test_map_of_the_code_names_what_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:src|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
