"""What the HTTP server accepts before it says no. Values only; it enforces nothing itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server, all of them per connection except `connections`.

    Times are seconds. A deadline is checked by the server's watch, so it fires up to one
    `tick_s` late.
    """

    connections: int = 16384
    head_bytes: int = 32 * 1024
    headers: int = 100
    body_bytes: int = 64 * 1024 * 1024
    pipelined: int = 4
    handshake_timeout_s: float = 10.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    write_buffer_bytes: int = 256 * 1024
    tick_s: float = 0.25
