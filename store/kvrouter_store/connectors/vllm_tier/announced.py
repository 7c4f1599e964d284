"""What a router tells a request's engine about KV: what is on its way, and which node has it.

`kv_transfer_params.kvstore` is kvrouter's own. A KV hint with a `kv.fetch` names the node as other
routers do: in `kv_transfer_params.kv_hint` (Dynamo), or as vLLM's `KvHintsEnvelope`
(vllm/v1/kv_hints/protocol.py; the payload: Dynamo's lib/kv-router/src/kv_hints.rs).
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

MAX_WAIT_S: Final = 86400.0
HINT: Final = "kv_hint"
"""The member of `kv_transfer_params` with an envelope."""
_PROTOCOL: Final = "0.1"
_FETCH: Final = "kv.fetch"
_FETCH_VERSION: Final = "1.0"
_HASHES: Final = range(1 << 64)


class Announced(NamedTuple):
    """A router's news: `blocks` leading blocks of the prompt land within `wait_s` seconds.

    blocks: None for any that are there already. source: the URL of the store's node where they are;
    '' for the engine's own. hinted: how many blocks a `kv.fetch` names.
    """

    blocks: int | None
    wait_s: float
    source: str = ""
    hinted: int = 0


def announced(params: Any, envelope: Any = None) -> Announced | None:
    """What `kv_transfer_params` and an envelope of hints announce; None for nothing valid."""
    params = params if isinstance(params, dict) else {}
    about = params.get("kvstore")
    about = about if isinstance(about, dict) else {}
    source, hinted = _fetch(envelope) or _fetch(params.get(HINT)) or (about.get("source"), 0)
    source = source if isinstance(source, str) else ""
    blocks: Any = about.get("coming_blocks")
    wait_s: Any = about.get("wait_s")
    if type(blocks) is int and blocks > 0 and type(wait_s) in {int, float} and wait_s > 0:
        return Announced(blocks, min(float(wait_s), MAX_WAIT_S), source, hinted)
    return Announced(None, 0.0, source, hinted) if source else None


def fetch_hint(message_id: str, source: str, block_hashes: Sequence[int]) -> dict[str, Any]:
    """An envelope: the node `source` has these blocks, by the low 64 bits of their hashes."""
    action = {
        "action_id": f"{message_id}-fetch",
        "action_type": _FETCH,
        "action_version": _FETCH_VERSION,
        "payload": {"source_control_endpoint": source, "block_hashes": block_hashes},
    }
    return {"protocol_version": _PROTOCOL, "message_id": message_id, "actions": [action]}


def _fetch(envelope: Any) -> tuple[str, int] | None:
    """Source and number of blocks of the first `kv.fetch` of an envelope; None: no valid one.

    Hints are advice: actions of other types are passed over, and so are other versions.
    """
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    for action in actions if isinstance(actions, list) else ():
        if not isinstance(action, dict) or action.get("action_type") != _FETCH:
            continue
        payload = action.get("payload")
        if action.get("action_version") != _FETCH_VERSION or not isinstance(payload, dict):
            return None
        source, hashes = payload.get("source_control_endpoint"), payload.get("block_hashes")
        if not isinstance(source, str) or not isinstance(hashes, list):
            return None
        meant = source and hashes and payload.get("mode", "copy") == "copy"
        return (source, len(hashes)) if meant and all(map(_is_hash, hashes)) else None
    return None


def _is_hash(value: Any) -> bool:
    return type(value) is int and value in _HASHES
