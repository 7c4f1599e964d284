"""From the prefill leg's answer to its KV in the store: whether decode can load what it needs."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.engine import HashDomain
from kvrouter.landing import Outcome
from kvrouter.plan import usable_blocks
from kvrouter.survey import hash_prompt
from kvstore.chain import HASH_BYTES

if TYPE_CHECKING:
    from kvrouter.chains import Chains
    from kvrouter.families.base import Handoff
    from kvrouter.landing import StoreView
    from kvrouter.metrics import Metrics
    from kvrouter.passage import Passage


class Handover:
    """Awaits landings.

    Args:
        store: the store, or None where engines hand over among themselves.
        chains: hashes prompts.
        timeout_s: how long after the prefill leg's answer a landing is awaited.
        metrics: counts and times landings.
    """

    def __init__(
        self, store: StoreView | None, chains: Chains, timeout_s: float, metrics: Metrics
    ) -> None:
        self._store = store
        self._chains = chains
        self._timeout_s = timeout_s
        self._metrics = metrics

    async def land(self, passage: Passage) -> int:
        """Wait for the KV that `passage.handoff` promises, and lease it in `passage.lease`.

        Returns:
            tokens that decode will have to compute after all; 0 where all has landed, or where
            the hand-off promises nothing that could be awaited.
        """
        handoff = passage.handoff
        if self._store is None or handoff is None:
            return 0
        if handoff.manifest is None:
            if handoff.transfer_params is None:
                self._metrics.handoff_missing.add()
            return 0
        hashes = self._hashes(passage, handoff)
        upto = min(handoff.blocks, len(hashes) // HASH_BYTES)
        if not upto:
            return self._missing(passage, handoff, 0)
        # The last block that was there already stands for all before it, which are not sent again:
        # no block goes from the store before those that follow it.
        held = passage.stored.get(handoff.manifest, 0) if passage.stored else 0
        first = max(0, min(held, upto) - 1)
        begun_s = monotonic()
        landing = await self._store.wait(
            handoff.manifest,
            hashes[first * HASH_BYTES : upto * HASH_BYTES],
            upto - first,
            self._timeout_s,
        )
        passage.lease = landing.lease
        passage.landed_blocks = first + landing.blocks if landing.blocks else 0
        self._metrics.handoff.observe(monotonic() - begun_s)
        self._metrics.landings.add(1, landing.outcome.value)
        if landing.outcome is Outcome.LANDED:
            passage.landed_blocks = upto
        return self._missing(passage, handoff, passage.landed_blocks)

    def _missing(self, passage: Passage, handoff: Handoff, landed_blocks: int) -> int:
        """Tokens of whole blocks that neither landed nor are known to be with the decode engine.

        Also where the prefill engine promised fewer blocks than the prompt has: its own way to the
        store may be cut.
        """
        domain, plan = passage.domain, passage.plan
        block_tokens = handoff.block_tokens or (domain.block_tokens if domain else 0)
        if handoff.prompt_tokens is None or not passage.hashable:
            return 0
        usable = usable_blocks(handoff.prompt_tokens, block_tokens)
        missing = max(0, usable - landed_blocks) * block_tokens
        return min(missing, plan.missing_tokens) if plan is not None else missing

    def _hashes(self, passage: Passage, handoff: Handoff) -> bytes:
        """The chain of the prompt, from what is known or from the ids that the engine answered."""
        if passage.hashes is not None:
            return passage.hashes
        request = passage.request
        if request is None or not passage.hashable or passage.domain is None:
            return b""
        told = None
        if handoff.block_tokens:
            told = HashDomain(handoff.block_tokens, handoff.root or passage.domain.root)
        if request.ids is not None:
            passage.hashes = hash_prompt(self._chains, passage, request.ids, told)
        elif handoff.ids is not None:
            passage.hashes = hash_prompt(self._chains, passage, handoff.ids, told)
        return passage.hashes or b""
