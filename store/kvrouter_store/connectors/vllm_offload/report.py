"""What an engine says about a finished request's blocks, for the router."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier


def full_group(scheduler: Any) -> int:
    """The place of the cache group of whose blocks a hit needs all; of models without one, 0."""
    reaches = [group.sliding_window_size_in_chunks for group in scheduler.config.kv_group_configs]
    return reaches.index(None) if None in reaches else 0


def report(scheduler: Any, status: Any, tier: "KVStoreTier", refusal: str) -> dict[str, Any]:
    """The `kv_transfer_params` about a request.

    `blocks`: leading blocks of the prompt that are or will be in the store. They are none while
    the store is away: the router would wait for them in vain.

    status: vLLM's state of the request; None where it never began.
    """
    if refusal:
        return {"refusal": refusal}
    place = full_group(scheduler)
    group = scheduler.config.kv_group_configs[place]
    link = tier.links[group.group_idx]
    blocks = 0
    if status is not None and not link.away:
        blocks = status.group_states[place].next_stored_chunk_idx
    spec = link.manifest.spec
    return {
        "manifest": link.manifest.digest.hex(),
        "blocks": blocks,
        "block_tokens": spec.block_tokens,
        "root": spec.root,
    }
