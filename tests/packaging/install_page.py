"""The commands in docs/install.md, by how they are tested."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/install.md"
BLOCK = re.compile(r"^```console ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, list[str]]]:
    """What follows `console` in the opening line of each block, and the block's commands."""
    return [
        (found[1], [line.removeprefix("$ ") for line in found[2].splitlines() if line])
        for found in BLOCK.finditer(PAGE.read_text())
    ]


def commands(how: str) -> list[str]:
    """The commands of the blocks that are tested this way, in the page's order."""
    return [command for words, block in blocks() if words == how for command in block]
