"""What the documents tell a person to type exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def _code(text: str) -> str:
    """The parts of a Markdown text that are code: only there is `make` a command."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def test_every_target_explains_itself() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    explained = set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE))
    assert {"demo", "test", "lint", "format", "protos", "clean", "help"} <= TARGETS
    assert explained == TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_documents_name_exist(document: Path) -> None:
    for words in re.findall(r"\bmake((?: +[a-z-]+)+)", _code(document.read_text("utf-8"))):
        assert set(words.split()) <= TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), target
