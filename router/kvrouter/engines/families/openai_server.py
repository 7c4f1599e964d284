"""Any server of OpenAI's API. It computes whole requests and shares no KV that the router knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvrouter.engines.families.base import Family, LegOrder
from kvrouter.engines.families.pages import LegSupport
from kvrouter.engines.families.parameters import VLLM

if TYPE_CHECKING:
    from kvrouter.engines.families.pages import EnginePages
    from kvrouter.engines.families.parameter_table import ParameterTable


class OpenAiServer(Family):
    """Servers that offer OpenAI's API alone, which has no token ids."""

    name: ClassVar[str] = "openai"
    parameters: ClassVar[ParameterTable] = VLLM
    order: ClassVar[LegOrder] = LegOrder.SINGLE
    health_path: ClassVar[str] = "/v1/models"

    async def legs(self, pages: EnginePages) -> LegSupport:
        """Whole requests alone."""
        return LegSupport(can_split=False)
