"""What an engine's own pages report, as detection reads them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.http.bounded_json import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.engines.engine import Bootstrap, Engine

    Ask = Callable[[Engine, str, bytes | None], Awaitable[bytes]]
    """Sends an engine a GET of a path or URL, or a POST of a body; returns the body of its 200.

    Raises ProbeFailed.
    """

MAX_RANKS: Final = 512
"""Data-parallel ranks of one engine: each is a target of its own, with connections and counts."""
METRICS_BYTES: Final = 1 << 20
"""They are searched by expressions, at 25 ms per MiB: vLLM's have some 100 KiB."""
_ABSENT: Final = frozenset({400, 401, 403, 404, 405, 501})


class ProbeFailed(Exception):
    """An engine does not answer a probe as it should."""

    def __init__(
        self, message: str, status: int = 0, *, silent: bool = False, ours: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status  # of its answer; 0: there is none, or it cannot be used
        self.silent = silent  # whether nothing came back, not even a refusal of the connection
        # Whether it could not be asked: the router has no descriptor or memory left.
        self.ours = ours


@dataclass(frozen=True, slots=True)
class LegSupport:
    """Which legs an engine can serve; see `Identity`."""

    can_split: bool = True
    can_serve_whole: bool = True
    bootstrap: Bootstrap | None = None


@dataclass(eq=False)
class EnginePages:
    """The pages of one engine, and its configured port; JSON and metrics are fetched once.

    `owner` is who owns its models, as /v1/models says.
    """

    engine: Engine
    ask: Ask
    bootstrap_port: int | None = None
    owner: object = None

    def __post_init__(self) -> None:
        self._json: dict[str, dict[str, Any]] = {}
        self._metrics: bytes | None = None

    async def body(self, path: str) -> bytes:
        """The page at a path or URL; ProbeFailed: the engine does not answer with a 200."""
        return await self.ask(self.engine, path, None)

    async def json(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`, or an empty one; ProbeFailed: the engine fails."""
        if path not in self._json:
            self._json[path] = await self._read_json(path)
        return self._json[path]

    async def metrics(self) -> bytes:
        """The first METRICS_BYTES of its metrics; empty if they cannot be read.

        Each search of them has a turn of the loop of its own.
        """
        if self._metrics is None:
            try:
                self._metrics = (await self.body("/metrics"))[:METRICS_BYTES]
            except ProbeFailed as error:
                if error.ours or error.silent:  # the next check asks again
                    raise
                self._metrics = b""
        await asyncio.sleep(0)
        return self._metrics

    async def _read_json(self, path: str) -> dict[str, Any]:
        try:
            found = orjson.loads(bounded(await self.body(path)))
        except ProbeFailed as error:
            if error.status not in _ABSENT:
                raise
            return {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}
