"""A load balancer in a process of its own, with the configuration that deploy/ recommends."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes.patience import until


@asynccontextmanager
async def balancer(log: Path, port: int, *command: str | Path) -> AsyncIterator[str]:
    """The URL of what this command starts; it ends with its context."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        await until(lambda: _listens(port), look_s=0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


def placed(configuration: Path, places: Mapping[str, str]) -> str:
    """The text of a file of deploy/, with ours in each of these places."""
    text = configuration.read_text()
    for place, ours in places.items():
        assert text.count(place) == 1, place
        text = text.replace(place, ours)
    return text


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True
