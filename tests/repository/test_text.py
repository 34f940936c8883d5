"""What is committed speaks of the project alone and works wherever it is cloned."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", ".venv", "runs", "build", "dist", "__pycache__"}

# Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a home directory": r"/(?:home|Users)/\w" + r"|(?<![\w.])/" + r"root/",
    "a workplace's directory": r"(?<![\w.$}])/" + r"(?:work|workspace|builds|mnt|media)/\w",
    "a package registry's host": r"(?:files\.python" + r"hosted|pypi\.(?:org|python)|npmjs\.org)",
    "an index or find-links option": r"--(?:extra-)?index" + r"-url|--find" + r"-links(?![\w-])",
}


def _tracked() -> Iterator[Path]:
    """The files that a clone would have; all that lie here when this is not a clone."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        yield from (ROOT / name for name in listed.stdout.split("\0") if name)
    else:
        yield from (path for path in ROOT.rglob("*") if not NOT_OURS & set(path.parts))


def _texts() -> Iterator[tuple[str, str]]:
    """Relative path and content of each tracked text file."""
    for path in sorted(_tracked()):
        # A tracked file that was just removed, and a link to a directory, have nothing to say.
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            yield path.relative_to(ROOT).as_posix(), content.decode("utf-8")


def _violations(name: str, text: str) -> list[str]:
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match.group()}"
        for what, pattern in FORBIDDEN.items()
        for match in re.finditer(pattern, text)
    ]


def test_no_text_names_a_place_outside_the_project() -> None:
    found = [line for name, text in _texts() for line in _violations(name, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "see /home" + "/someone/project",
        'open("/root' + '/x")',
        "cd /work" + "/main",
        "https://pypi" + ".org/simple",
        "--index" + "-url https://example.com",
    ],
)
def test_the_search_would_find(text: str) -> None:
    assert _violations("sample", text)


def test_text_files_end_their_lines_alike() -> None:
    assert not [name for name, text in _texts() if "\r" in text]
    assert not [name for name, text in _texts() if text and not text.endswith("\n")]
