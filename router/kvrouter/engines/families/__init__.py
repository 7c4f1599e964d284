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

    from kvrouter.engines.families.base import Family

FAMILIES: Final[Mapping[str, type[Family]]] = MappingProxyType(
    {family.name: family for family in (Vllm, Nixl, Mooncake, MooncakeLegacy, Sglang, OpenAiServer)}
)
"""Every family by its name; a new one is one word here."""
