"""Any server of OpenAI's API. It computes whole requests and shares no KV that the router knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from kvrouter.engines.families.base import Family, LegOrder
from kvrouter.engines.families.pages import EnginePages, LegSupport
from kvrouter.engines.families.parameters import VLLM

if TYPE_CHECKING:
    from kvrouter.engines.families.parameter_table import ParameterTable


TENSORRT_LLM: Final = "tensorrt_llm"
"""Who owns its models (tensorrt_llm/serve/openai_protocol.py, `ModelCard`). It has vLLM's /version
and refuses members of a body that are not OpenAI's."""


class OpenAiServer(Family):
    """Servers that offer OpenAI's API alone, which has no token ids."""

    name: ClassVar[str] = "openai"
    summary: ClassVar[str] = "engines that transfer none"
    parameters: ClassVar[ParameterTable] = VLLM
    order: ClassVar[LegOrder] = LegOrder.SINGLE
    health_path: ClassVar[str] = "/v1/models"

    async def detects(self, pages: EnginePages) -> bool:
        """TensorRT-LLM at once, which looks like vLLM; others show no other family."""
        return pages.owner == TENSORRT_LLM

    async def legs(self, pages: EnginePages) -> LegSupport:
        """Whole requests alone."""
        return LegSupport(can_split=False)
