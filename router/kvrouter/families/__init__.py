"""Engine families: the dialects that engines speak."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvrouter.families.vllm import Vllm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.families.base import Family

FAMILIES: Final[Mapping[str, type[Family]]] = MappingProxyType({Vllm.name: Vllm})
"""Every family by its name; a new one is one line here."""
