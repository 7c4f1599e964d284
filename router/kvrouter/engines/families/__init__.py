"""Engine families: the dialects that engines speak."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from kvrouter.engines.families.base import LegOrder
from kvrouter.engines.families.mooncake import Mooncake, MooncakeLegacy
from kvrouter.engines.families.nixl import Nixl
from kvrouter.engines.families.openai_server import OpenAiServer
from kvrouter.engines.families.p2p import P2p
from kvrouter.engines.families.sglang import Sglang
from kvrouter.engines.families.vllm import Vllm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.base import Family
    from kvrouter.engines.families.pages import EnginePages

log = logging.getLogger(__name__)

FAMILIES: Final[Mapping[str, type[Family]]] = MappingProxyType(
    {
        family.name: family
        for family in (
            Vllm,
            Nixl,
            Mooncake,
            MooncakeLegacy,
            P2p,
            Sglang,
            OpenAiServer,
        )
    }
)
"""Every family by its name. A new one is a file and a word here (docs/extend.md)."""

AUTO: Final = "auto"

if TYPE_CHECKING:
    Connector = str
else:
    Connector = Literal[(AUTO, *FAMILIES)]
"""Values of `--kv-connector`."""


def uses_store(family: str | None) -> bool:
    """Whether engines of the family share KV through a store; None: no family is known yet."""
    return family is not None and FAMILIES[family].order is LegOrder.STORE


def connects_publisher(family: str | None) -> bool:
    """Whether engines of the family send KV events to `--kv-events-bind`; None: as above."""
    return family is not None and FAMILIES[family].connects_publisher


class Families:
    """One dialect of each family, for one router."""

    def __init__(self, types: Mapping[str, type[Family]] = FAMILIES) -> None:
        self._by_name = {name: family() for name, family in types.items()}

    def named(self, name: str) -> Family:
        """The family of that name; KeyError: none."""
        return self._by_name[name]

    def of(self, engine: Engine) -> Family:
        """The family of `engine`."""
        return self._by_name[engine.family]

    async def detect(self, pages: EnginePages) -> Family:
        """The family that an engine's pages show; ProbeFailed: the engine does not answer.

        Later families are tried first: what derives from another one is more specific.
        """
        for family in reversed(list(self._by_name.values())):
            if await family.detects(pages):
                return family
        log.info(
            "engine %s is taken for a plain OpenAI server: no page shows another family",
            pages.engine.address,
        )
        return self._by_name[OpenAiServer.name]
