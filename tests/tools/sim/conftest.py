"""Simulated engines for tests: each in a thread of its own, asked over real sockets."""

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings

DEADLINE_S = 20


class LiveSim:
    """A simulated engine that listens. Enter it, ask it, leave it."""

    def __init__(self, settings: SimSettings) -> None:
        self.server = SimServer(settings)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "LiveSim":
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self.server.start(), self._loop)
        self.port = started.result(DEADLINE_S)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def call(self, function: Callable[[], object]) -> None:
        """Call it on the engine's loop, soon."""
        self._loop.call_soon_threadsafe(function)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, prompt: str | list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """The decoded answer of a completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, **more}
        status, answer = self.ask("POST", "/v1/completions", json.dumps(body).encode())
        assert status == 200, answer
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def text(self, prompt: str | list[int], max_tokens: int = 8, **more: Any) -> str:
        """The text of a completion."""
        return str(self.complete(prompt, max_tokens, **more)["choices"][0]["text"])

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series, as the engine exposes it."""
        _, exposition = self.ask("GET", "/metrics")
        for line in exposition.decode().splitlines():
            found = re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                return float(found[2])
        raise KeyError(name)

    def tokens_from(self, source: str) -> int:
        """Prompt tokens by source, vLLM's counter."""
        return int(self.metric("vllm:prompt_tokens_by_source_total", source=source))


@pytest.fixture
def live_sim() -> Iterator[Callable[..., LiveSim]]:
    """Starts simulated engines with the given settings; they end with the test."""
    with ExitStack() as stack:

        def start(**settings: Any) -> LiveSim:
            whole = {"model": "tiny", "port": 0, "seed": 1, "block_size": 16, **settings}
            return stack.enter_context(LiveSim(SimSettings(**whole)))

        yield start
