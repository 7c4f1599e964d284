"""Engine families: the dialects that engines speak."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvrouter.engines.families.mooncake import Mooncake
from kvrouter.engines.families.mooncake_legacy import MooncakeLegacy
from kvrouter.engines.families.nixl import Nixl
from kvrouter.engines.families.openai_server import OpenAiServer
from kvrouter.engines.families.sglang import Sglang
from kvrouter.engines.families.vllm import Vllm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.base import Family

FAMILIES: Final[Mapping[str, type[Family]]] = MappingProxyType(
    {family.name: family for family in (Vllm, Nixl, Mooncake, MooncakeLegacy, Sglang, OpenAiServer)}
)
"""Every family by its name; a new one is one word here."""


class Families:
    """One instance of every family."""

    def __init__(self) -> None:
        self._by_name: dict[str, Family] = {name: family() for name, family in FAMILIES.items()}

    def named(self, name: str) -> Family:
        """The family of that name; KeyError if there is none."""
        return self._by_name[name]

    def of(self, engine: Engine) -> Family:
        """The family of `engine`."""
        return self._by_name[engine.family]
