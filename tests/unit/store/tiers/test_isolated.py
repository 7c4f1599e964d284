"""A tier's process may end at any point, also within an answer, and tells nobody its URL."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter_store.tiers.base import TierAway
from kvrouter_store.tiers.isolated import Isolated
from kvrouter_store.tiers.staging import Staging

URL = "mooncake://host?metadata=http://user:secret@host/metadata"
PATIENCE_S = 30.0
STARTED = "read url; read line; echo '[0, null, null]'"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the next process be a script of the shell."""
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))

    def script(lines: str) -> None:
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)

    return script


async def test_a_process_that_dies_within_an_answer_fails_the_call_and_can_be_made_again(
    script: Callable[[str], None],
) -> None:
    tier, memory = Isolated(URL), Staging(1 << 20).memory
    async with asyncio.timeout(PATIENCE_S):
        script(f"{STARTED}; read line; printf '[1, [tr'")
        await tier.start(memory)
        with pytest.raises(TierAway, match="has ended"):
            await tier.holds(["a"])
        await tier.stop()
        script("read url; read line; echo '[2, null, null]'; read line; echo '[3, [true], null]'")
        await tier.start(memory)
        assert await tier.holds(["a"]) == [True]
        await tier.stop()


async def test_a_url_is_not_among_the_arguments_of_the_process(
    script: Callable[[str], None], tmp_path: Path
) -> None:
    tier, told = Isolated(URL), tmp_path / "told"
    ready = "read line; echo '[0, null, null]'; read line"
    script(f"""read url; printf '%s\\n' "$*" "$url" > {told}; {ready}""")
    async with asyncio.timeout(PATIENCE_S):
        await tier.start(Staging(1 << 20).memory)
        await tier.stop()
    arguments, url = told.read_text().splitlines()
    assert "secret" not in arguments
    assert url == URL
