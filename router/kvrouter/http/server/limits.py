"""What the HTTP server accepts before it says no. Values only; it enforces nothing itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server: `connections` and `body_memory_bytes` of all, the others of each.

    `body_memory_bytes` may be taken by bodies that are not whole yet; one that comes in a single
    read never counts.
    `pipelined` requests and `pipelined_bytes` of further ones may wait behind the one under way.
    Times are seconds. A deadline is checked by the server's watch, so it fires up to one
    `tick_s` late.
    """

    connections: int = 16384
    body_memory_bytes: int = 512 * 1024 * 1024
    head_bytes: int = 32 * 1024
    headers: int = 100
    url_bytes: int = 8 * 1024
    body_bytes: int = 64 * 1024 * 1024
    pipelined: int = 64
    pipelined_bytes: int = 64 * 1024
    handshake_timeout_s: float = 10.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    write_buffer_bytes: int = 256 * 1024
    tick_s: float = 0.25
