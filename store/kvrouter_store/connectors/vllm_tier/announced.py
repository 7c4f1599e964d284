"""What a router announces to a decode engine in a request's `kv_transfer_params`."""

from typing import Any, Final, NamedTuple

MAX_WAIT_S: Final = 86400.0


class Announced(NamedTuple):
    """A router's news: `blocks` leading blocks of the prompt land within `wait_s` seconds."""

    blocks: int
    wait_s: float


def announced(params: Any) -> Announced | None:
    """What `kv_transfer_params` announce; None where they announce nothing valid."""
    about = params.get("kvstore") if isinstance(params, dict) else None
    if not isinstance(about, dict):
        return None
    blocks, wait_s = about.get("coming_blocks"), about.get("wait_s")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks <= 0:
        return None
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not wait_s > 0:
        return None
    return Announced(blocks, min(float(wait_s), MAX_WAIT_S))
