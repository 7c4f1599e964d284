"""The pages as tests read them: blocks of commands, and tables."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```console ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^\$ ", re.MULTILINE)


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """What follows `console` in the opening line of each block, and its commands."""
    for found in BLOCK.finditer(page.read_text()):
        yield found[1], [each.strip() for each in PROMPT.split(found[2])[1:]]


def commands(page: Path, how: str) -> list[str]:
    """The commands of the blocks that are tested this way, in the page's order."""
    return [command for words, block in blocks(page) if words == how for command in block]


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of each row of each table, without headings."""
    for line in page.read_text().splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]
