"""A load balancer in a process of its own, with the configuration that deploy/ recommends."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

PATIENCE_S = 20.0


@asynccontextmanager
async def balancer(log: Path, port: int, *command: str | Path) -> AsyncIterator[str]:
    """The URL of what this command starts; it ends with its context."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        await _until_it_listens(port)
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


async def _until_it_listens(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            await writer.wait_closed()
            return
