"""--log-format, where stderr is a pipe: what is asked for, and JSON else."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from tests.fakes.engine import engines

COMMAND = str(Path(sys.executable).with_name("kvrouter"))


async def logged(*arguments: str) -> list[str]:
    """What a command logs until it is told to end."""
    process = await asyncio.create_subprocess_exec(
        COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, lines = await process.communicate()
    assert process.returncode == 0
    return lines.decode().splitlines()


def is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@pytest.mark.parametrize(("form", "wanted"), [("text", False), ("json", True), ("auto", True)])
async def test_lines_have_the_form_that_is_asked_for(
    form: str, wanted: bool, tmp_path: Path
) -> None:
    async with engines(1) as [decode]:
        router = await logged(
            "serve", "--decode", decode.address, "--port", "0", "--log-format", form
        )
    store = await logged(
        "store", "--port", "0", "--http-port", "0", "--unix-socket", str(tmp_path / "s"),
        "--memory", "1MiB", "--log-format", form,
    )  # fmt: skip
    for lines in (router, store):
        assert lines
        assert [is_json(line) for line in lines] == [wanted] * len(lines)
