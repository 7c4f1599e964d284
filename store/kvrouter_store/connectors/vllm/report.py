"""What an engine says about a finished request's blocks, for the router."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier


def report(scheduler: Any, status: Any, tier: "KVStoreTier", refusal: str) -> dict[str, Any]:
    """The `kv_transfer_params` about a request.

    `manifest`: of the blocks of which a hit needs all; `groups`: what further groups need.
    `waits`: it can be asked before its KV has landed. `node`: its own node of the store.
    `blocks`: leading blocks of the prompt that are or will be in the store, with all that a hit
    needs where they end. They are none while the store is away: the router would wait in vain.
    `cause`: why they are none, in the router's words (`NothingLanded`). `fetch`: what became of the
    blocks that a hint named. `held`: leading tokens of the prompt that were in the engine's own
    cache; what it reused beyond them came from the store.

    status: vLLM's state of the request; None where it never began.
    """
    if refusal:
        return {"refusal": refusal}
    configs = scheduler.config.kv_group_configs
    unit = scheduler.config.tokens_per_hash
    if any(config.tokens_per_chunk != unit for config in configs):
        return {"refusal": "the router cannot match cache groups with blocks of different sizes"}
    groups = [
        {
            "manifest": tier.links[config.group_idx].manifest.digest.hex(),
            "reach": config.sliding_window_size_in_chunks,
        }
        for config in configs
    ]
    groups.sort(key=lambda group: group["reach"] is not None)
    blocks, cause = 0, "engine_store_away"
    if not tier.away:
        blocks, cause = (0, "not_put") if status is None else _promised(scheduler, status, unit)
    about = {
        "manifest": groups[0]["manifest"],
        "blocks": blocks,
        "block_tokens": unit,
        "root": next(iter(tier.links.values())).manifest.spec.root,
        "waits": True,
    }
    if not blocks:
        about["cause"] = cause
    if status is not None:
        about["held"] = int(status.num_locally_computed_tokens)
    if tier.node:
        about["node"] = tier.node
    fetched = tier.arrivals.fetched(status.req_context) if status is not None else None
    if fetched is not None:
        about["fetch"] = fetched
    if len(groups) > 1 or groups[0]["reach"] is not None:
        about["groups"] = groups
    return about


def _promised(scheduler: Any, status: Any, block_tokens: int) -> tuple[int, str]:
    """Leading blocks that the store has been given, or has been found to have; why none."""
    if status.max_offload_tokens == 0:
        return 0, "not_shared"
    given = list(zip(scheduler.config.kv_group_configs, status.group_states, strict=True))
    blocks = min(state.next_stored_chunk_idx for _, state in given)
    tails = [
        (config.sliding_window_size_in_chunks, state.offload_keys)
        for config, state in given
        if config.sliding_window_size_in_chunks is not None
    ]
    if not blocks or not tails:
        return int(blocks), "host_memory"
    # A tail is kept where a hit of the same prompt ends: one token is always left to compute.
    blocks = min(blocks, (status.req.num_prompt_tokens - 1) // block_tokens)
    held, loaded = (
        scheduler.manager.primary_tier,
        scheduler.manager.leases.loaded(status.req_context),
    )
    for reach, keys in tails:
        for key in keys[max(0, blocks - reach) : blocks]:
            if key not in loaded and held.lookup(key, status.req_context).name == "MISS":
                return 0, "no_tail"
    return int(blocks), "host_memory"
