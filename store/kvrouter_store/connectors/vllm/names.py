"""Which requests of an engine may share blocks, and whether it names blocks as it says."""

import logging
from typing import Any

from kvrouter_store.identity.chain import hash_tokens


class NameCheck:
    """Compares an engine's block hashes with ours, on its first plain request.

    root: hex of the chain's root. unit: tokens of one hash. refusal: why nothing is shared ('').
    """

    def __init__(self, root: str, unit: int, log: logging.Logger) -> None:
        self._root = bytes.fromhex(root)
        self._unit = unit
        self._log = log
        self._done = False
        self.refusal = ""

    def agree(self, request: Any) -> bool:
        """Whether the engine names blocks as its manifest says, as far as is known."""
        if self._done or not request.block_hashes or not _is_plain(request):
            return not self.refusal
        self._done = True
        ours = hash_tokens(
            list(request.prompt_token_ids or [])[: self._unit],
            self._unit,
            root=self._root,
            cache_salt=request.cache_salt,
        )
        if len(ours) and ours[0] != bytes(request.block_hashes[0]):
            self.refusal = "the engine's block hashes are not those its manifest names"
            self._log.error("KV is not shared: %s", self.refusal)
        return not self.refusal


def may_share(request: Any) -> bool:
    """Not embedded prompts (no tokens), pooled ones (no answer), or sessions (rewritten tails)."""
    return (
        request.prompt_embeds is None and request.pooling_params is None and not request.resumable
    )


def _is_plain(request: Any) -> bool:
    return request.lora_request is None and not request.mm_features
