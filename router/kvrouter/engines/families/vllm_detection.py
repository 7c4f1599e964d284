"""How engines of vLLM are detected: by /version, their metrics and the answer to a probe."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, ClassVar, Final

from kvrouter.engines.families.base import Family
from kvrouter.engines.families.pages import ProbeFailed

if TYPE_CHECKING:
    from kvrouter.engines.families.base import Handoff
    from kvrouter.engines.families.pages import EnginePages

_BLOCK_SIZE: Final = re.compile(rb'^vllm:cache_config_info\{[^}\n]*\bblock_size="(\d+)"', re.M)
_NIXL: Final = re.compile(rb"^vllm:nixl_", re.M)
_RANKS: Final = re.compile(rb'^vllm:num_requests_running\{[^}\n]*\bengine="(\d+)"', re.M)

log = logging.getLogger(__name__)


class VllmDetection(Family):
    """The detection of a vLLM engine."""

    detected_by: ClassVar[tuple[str, str] | None] = ("/version", "version")

    async def by_probe(self, handoff: Handoff, pages: EnginePages) -> str:
        """By its connector; ProbeFailed: it has two, each of which hands KV over in its own way."""
        nixl = _NIXL.search(await pages.metrics()) is not None
        if handoff.manifest is not None and nixl:
            raise ProbeFailed(
                "it has kvrouter's connector and NixlConnector (by MultiConnector), and the router "
                "uses one of them: start it with one, or give --kv-connector store, by which its "
                "NixlConnector is not used"
            )
        if nixl:
            log.info("engine %s is vLLM with NixlConnector, by its metrics", pages.engine.address)
            return "nixl"
        if handoff.manifest is None:
            log.warning(
                "engine %s is vLLM, and neither kvrouter's connector nor NixlConnector was found "
                "in it: the router assumes that it shares KV through a store of its own (LMCache, "
                "MooncakeStore), or not at all. MooncakeConnector cannot be detected: give "
                "--kv-connector mooncake",
                pages.engine.address,
            )
        return self.name

    async def event_ranks(self, pages: EnginePages) -> tuple[int, ...]:
        """The labels of its metrics."""
        found = _RANKS.findall(await pages.metrics())
        return tuple(sorted({int(number) for number in found}))

    async def block_tokens(self, pages: EnginePages) -> int:
        """From vllm:cache_config_info."""
        found = _BLOCK_SIZE.search(await pages.metrics())
        return int(found.group(1)) if found else 0

    async def version(self, pages: EnginePages) -> object:
        """From /version."""
        return (await pages.json("/version")).get("version")
