"""Bounds of the HTTP server. Values only."""

from dataclasses import dataclass
from typing import Final

FULL: Final = "The memory for request bodies is full; try again."


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server, most of them of each connection. Deadlines fire up to `tick_s` late."""

    connections: int = 16384
    backlog: int = 4096  # of those that wait to be accepted; so many may be accepted in one turn
    refused: int = 64  # of further ones: those that get a moment to read why
    patience_s: float = 1.0  # where there are too many: who sends no request for so long, goes
    body_memory_bytes: int = 512 * 1024 * 1024  # of all bodies that are not whole yet
    head_bytes: int = 32 * 1024
    headers: int = 100
    url_bytes: int = 8 * 1024
    body_bytes: int = 64 * 1024 * 1024
    pipelined: int = 64  # requests that may wait behind the one that is served
    pipelined_bytes: int = 64 * 1024  # of further ones
    handshakes: int = 512  # under way, of TLS; the oldest gives way
    handshake_timeout_s: float = 10.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    write_buffer_bytes: int = 256 * 1024
    tick_s: float = 0.25
