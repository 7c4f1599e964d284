"""An engine as TensorRT-LLM's server looks from outside.

tensorrt_llm/serve/openai_server.py and openai_protocol.py of 1.3: vLLM's /version, /tokenize under
another path, statistics as JSON under /metrics, and bodies whose unknown members are a 400.
"""

import json
from typing import Final

from tests.fakes.engine import FakeEngine, Json

from kvrouter.http.server.exchange import Exchange

TAKEN: Final = frozenset(
    {
        "add_special_tokens",
        "best_of",
        "chat_template",
        "chat_template_kwargs",
        "conversation_params",
        "detokenize",
        "disaggregated_params",
        "documents",
        "echo",
        "early_stopping",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "lora_request",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "presence_penalty",
        "priority",
        "prompt",
        "prompt_ignore_length",
        "reasoning_effort",
        "repetition_penalty",
        "response_format",
        "return_context_logits",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "top_p_min",
        "truncate_prompt_tokens",
        "use_beam_search",
        "user",
    }
)
"""Members of its completions and chats."""


class TensorRtLlmEngine(FakeEngine):
    """See above; what it answers is `FakeEngine`'s."""

    async def _version(self, exchange: Exchange) -> None:
        exchange.respond(200, b'{"version": "1.3.0"}')

    async def _models(self, exchange: Exchange) -> None:
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
        exchange.respond(200, json.dumps({"object": "list", "data": [card]}).encode())

    async def _tokenize(self, exchange: Exchange) -> None:
        exchange.respond(404, b'{"detail": "Not Found"}')

    async def _answer(self, exchange: Exchange, body: Json, mode: str) -> None:
        unknown = sorted(body.keys() - TAKEN)
        if unknown:
            told = {"error": f"{unknown}: Extra inputs are not permitted"}
            exchange.respond(400, json.dumps(told).encode())
        else:
            await super()._answer(exchange, body, mode)
