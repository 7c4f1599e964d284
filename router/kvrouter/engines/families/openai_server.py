"""Any server of OpenAI's API, as an engine that computes its prompts itself.

It may share KV with others all the same, through a store of which the router is told nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvrouter.engines.families.base import Family, LegOrder
from kvrouter.engines.families.parameters import VLLM

if TYPE_CHECKING:
    from kvrouter.engines.families.table import ParameterTable


class OpenAiServer(Family):
    """Servers of which nothing is known but OpenAI's API, which has no token ids."""

    name: ClassVar[str] = "openai"
    parameters: ClassVar[ParameterTable] = VLLM
    order: ClassVar[LegOrder] = LegOrder.SINGLE
    health_path: ClassVar[str] = "/v1/models"
