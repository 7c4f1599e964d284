"""Reads answers of servers that are asked aside of requests, up to a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp


async def read_bounded(
    answer: aiohttp.ClientResponse, most_bytes: int, failed: Callable[[str], Exception]
) -> bytes:
    """The body of `answer`; raises what `failed` makes of a sentence where it is longer."""
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > most_bytes:
            raise failed(f"{answer.url.path} answers more than {most_bytes} bytes")
    return bytes(content)
