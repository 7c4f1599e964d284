"""Every command in docs/install.md is run by a test, or says why not."""

import pytest
from tests.docs.pages import DOCS, ROOT, blocks

TESTED_IN = {"bare container", "build container"}  # tests/packaging


BLOCKS = list(blocks(DOCS / "install.md"))


@pytest.mark.parametrize(("words", "commands"), BLOCKS, ids=lambda value: str(value)[:40])
def test_a_block_names_its_test_or_what_it_needs(words: str, commands: list[str]) -> None:
    assert commands
    if words not in TESTED_IN:
        reason, _, where = words.removeprefix("needs ").partition(": ")
        assert words.startswith("needs ")
        assert reason
        assert (ROOT / where).exists()
