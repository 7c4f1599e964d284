"""What a router announces to a decode engine in a request's `kv_transfer_params`."""

from typing import Any, Final, NamedTuple

MAX_WAIT_S: Final = 86400.0


class Announced(NamedTuple):
    """A router's news: `blocks` leading blocks of the prompt land within `wait_s` seconds.

    blocks: None for any that are there already. source: the URL of the store's node where they are;
    '' for the engine's own.
    """

    blocks: int | None
    wait_s: float
    source: str = ""


def announced(params: Any) -> Announced | None:
    """What `kv_transfer_params` announce; None where they announce nothing valid."""
    about = params.get("kvstore") if isinstance(params, dict) else None
    if not isinstance(about, dict):
        return None
    blocks: Any = about.get("coming_blocks")
    wait_s: Any = about.get("wait_s")
    source = about.get("source")
    source = source if isinstance(source, str) else ""
    if type(blocks) is int and blocks > 0 and type(wait_s) in {int, float} and wait_s > 0:
        return Announced(blocks, min(float(wait_s), MAX_WAIT_S), source)
    return Announced(None, 0.0, source) if source else None
