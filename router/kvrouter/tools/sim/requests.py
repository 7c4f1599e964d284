"""What a simulated engine accepts: vLLM 0.32's rules for a request, and its refusals. Pure.

Rules and wording follow vllm/entrypoints/openai/{completion,chat_completion}/protocol.py and
vllm/sampling_params.py; tests/fakes/openai_cases.py holds them, for this engine and the real one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from kvrouter.errors import ApiError, bad_request
from kvrouter.openai.request import Kind, checked_salt
from kvrouter.tools.sim.schemas import Form, form_of
from kvrouter.tools.sim.tokenizer import SimTokenizer
from kvrouter_store.connectors.vllm_tier.announced import announced

T = TypeVar("T", bool, int, float)
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_TOKEN_ID = 2**32 - 1
_MAX_PROMPTS = 1024
_GREEDY_BELOW = 1e-5
_NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."
_NOUNS: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True)
class GenerateRequest:
    """A valid request."""

    kind: Kind
    model: str
    prompts: list[list[int]]  # token ids of each prompt
    n: int  # choices for each prompt
    seed: int | None  # of the first choice of each prompt; None for the likeliest tokens
    max_tokens: int | None  # None until the model would stop by itself
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    ignore_eos: bool
    cache_salt: str | None
    # Name and path of the LoRA adapter that `model` names, or None.
    adapter: tuple[str, str] | None = None
    priority: int = 0  # lower goes first, if the engine schedules by it
    source: str = ""  # URL of a store node that has KV which the engine's own may lack, or ""
    form: Form | None = None  # what the answer has to be; None for any text

    @property
    def prompt(self) -> list[int]:
        """The prompt of a request for one choice."""
        (prompt,) = self.prompts
        return prompt

    def choices(self) -> "list[GenerateRequest]":
        """A request for each choice, in the order of their indices, as vLLM seeds and counts them.

        vllm/v1/engine/parallel_sampling.py: sample i of a prompt has the seed + i.
        """
        return [
            replace(
                self, prompts=[prompt], n=1, seed=None if self.seed is None else self.seed + sample
            )
            for prompt in self.prompts
            for sample in range(self.n)
        ]


def parse_request(
    data: Mapping[str, Any], kind: Kind, tokenizer: SimTokenizer, names: tuple[str, ...], most: int
) -> GenerateRequest:
    """Check and tokenize a request. Raises ApiError with vLLM's status and wording."""
    _check_stream_options(data)
    _check_unsupported(data)
    model = _model(data, names)
    max_tokens = _max_tokens(data, kind, most)
    _check_sampling(data, max_tokens)
    n, seed = _samples(data)
    salt = data.get("cache_salt")
    reused = None
    if kind == "completion":
        prompts = _completion_prompts(data, tokenizer)
    else:
        rendered, reused = _chat(data, tokenizer), _reused_ids(data)
        prompts = [reused or rendered]
    for prompt in prompts:
        _check_room(len(prompt), most, reused=reused is not None)
    options = data.get("stream_options") or {}
    include_usage = _flag(options, "include_usage")
    told = announced(data.get("kv_transfer_params"))
    return GenerateRequest(
        kind=kind,
        model=model,
        prompts=prompts,
        n=n,
        seed=seed,
        max_tokens=max_tokens,
        stream=_flag(data, "stream"),
        include_usage=include_usage,
        continuous_usage=include_usage and _flag(options, "continuous_usage_stats"),
        return_token_ids=_flag(data, "return_token_ids"),
        ignore_eos=_flag(data, "ignore_eos"),
        cache_salt=None if salt is None else checked_salt(salt),
        priority=_value(data, "priority", int) or 0,
        source=told.source if told is not None else "",
        form=form_of(data, kind),
    )


def parse_tokenize(body: bytes, tokenizer: SimTokenizer, names: tuple[str, ...]) -> list[int]:
    """The token ids that /tokenize answers for a prompt or a conversation."""
    data = json_object(body, no_request)
    _model(data, names)
    if "messages" in data:
        return _chat(data, tokenizer)
    prompt = data.get("prompt")
    if not isinstance(prompt, str):
        raise bad_request("prompt: Input should be a valid string", "prompt")
    return tokenizer.encode(prompt)


def json_object(body: bytes, refusal: Callable[[str], ApiError]) -> dict[str, Any]:
    """A JSON object; raises the `refusal` of what is wrong with it."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise refusal(f"JSON decode error: {error}") from None
    if not isinstance(data, dict):
        raise refusal("Input should be a valid dictionary")
    return data


def no_request(problem: str) -> ApiError:
    """400: the body is no request."""
    return ApiError(400, f"1 validation error:\n  {problem}", kind="Bad Request")


def _value(data: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """A member of the type `kind`, or None; an integer is a number too."""
    value = data.get(name)
    if value is None:
        return None
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise bad_request(f"{name}: Input should be a valid {_NOUNS[kind]}", name)
    return kind(value)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    return _value(data, name, bool) or False


def _check_stream_options(data: Mapping[str, Any]) -> None:
    options = data.get("stream_options")
    if options and not data.get("stream"):
        raise bad_request(
            "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    if options is not None and not isinstance(options, dict):
        raise bad_request("stream_options: Input should be a valid dictionary", "stream_options")


def _check_unsupported(data: Mapping[str, Any]) -> None:
    """Refuse what real engines do and the simulator does not."""
    sampling = ("echo", "use_beam_search", "logprobs", "prompt_logprobs", "top_logprobs")
    for name in (*sampling, "background", "previous_response_id"):
        if data.get(name):
            raise bad_request(f"The simulator has no {name}.", name)


def _model(data: Mapping[str, Any], names: tuple[str, ...]) -> str:
    model = data.get("model")
    if model is None or model == "":
        return names[0]
    if not isinstance(model, str):
        raise bad_request("model: Input should be a valid string", "model")
    if model not in names:
        raise ApiError(404, f"The model `{model}` does not exist.", param="model")
    return model


def _max_tokens(data: Mapping[str, Any], kind: Kind, max_model_len: int) -> int | None:
    name = "max_tokens"
    value = _value(data, "max_tokens", int)
    if kind == "completion":
        value = _DEFAULT_COMPLETION_TOKENS if value is None else value
    elif data.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
        value = _value(data, name, int)
    if value is None:
        return None
    if value < 1:
        raise bad_request(f"max_tokens must be at least 1, got {value}.", "max_tokens")
    if value > max_model_len:
        raise bad_request(
            f"{name}={value} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            name,
        )
    return value


_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, 2.0, "temperature must be in [0, 2]"),
    ("presence_penalty", -2.0, 2.0, "presence_penalty must be in [-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "frequency_penalty must be in [-2, 2]"),
    ("min_p", 0.0, 1.0, "min_p must be in [0, 1]"),
)


def _check_sampling(data: Mapping[str, Any], max_tokens: int | None) -> None:
    for name, least, most, message in _RANGES:
        value = _value(data, name, float)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise bad_request(f"{message}, got {value}.", name)
    top_p = _value(data, "top_p", float)
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p")
    min_tokens = _value(data, "min_tokens", int) or 0
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )


def _samples(data: Mapping[str, Any]) -> tuple[int, int | None]:
    """How many choices for each prompt, and their seed if they are drawn at random."""
    given, seed = _value(data, "n", int), _value(data, "seed", int)
    n = 1 if given is None else given
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.", "n")
    temperature = _value(data, "temperature", float)
    if temperature is not None and temperature < _GREEDY_BELOW:
        if n > 1:
            raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
        seed = None
    return n, seed


def _completion_prompts(data: Mapping[str, Any], tokenizer: SimTokenizer) -> list[list[int]]:
    prompt = data.get("prompt")
    if prompt is None or prompt in ("", []):
        raise bad_request(_NO_PROMPT, "prompt")
    if not isinstance(prompt, str | list):
        raise bad_request("prompt: Input should be a valid list or string", "prompt")
    if isinstance(prompt, str) or not isinstance(prompt[0], str | list):
        return [_one_prompt(prompt, tokenizer)]
    if len(prompt) > _MAX_PROMPTS:
        raise bad_request(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of "
            f"{_MAX_PROMPTS}. To increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS "
            "environment variable.",
            "prompt",
        )
    if any(type(one) is not type(prompt[0]) for one in prompt):
        raise bad_request("prompt.0: Input should be a valid integer", "prompt")
    return [_one_prompt(one, tokenizer) for one in prompt]


def _one_prompt(prompt: str | list[Any], tokenizer: SimTokenizer) -> list[int]:
    if not prompt:
        raise bad_request(_NO_PROMPT, "prompt")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in prompt):
        raise bad_request("prompt: token ids are integers of 0 to 2**32 - 1", "prompt")
    return prompt


def _chat(data: Mapping[str, Any], tokenizer: SimTokenizer) -> list[int]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages: Field required, a list that is not empty", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request("messages: each one has a role", "messages")
        if not isinstance(message.get("content"), str | list | None):
            raise bad_request("messages: content is text or a list of parts", "messages")
    again = _flag(data, "continue_final_message")
    generate = data.get("add_generation_prompt")
    if again and generate:
        raise bad_request(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    return tokenizer.render_chat(
        messages,
        tools=data.get("tools"),
        add_generation_prompt=not again and generate is not False,
        continue_final_message=again,
    )


def _reused_ids(data: Mapping[str, Any]) -> list[int] | None:
    """Token ids given for a chat, used instead of its text (vllm/renderers/online_renderer.py)."""
    params = data.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if ids is None or not all(_is_text(message.get("content")) for message in data["messages"]):
        return None
    if not isinstance(ids, list) or not ids or any(type(x) is not int or x < 0 for x in ids):
        raise bad_request(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative "
            "integers.",
            "kv_transfer_params.prompt_token_ids",
        )
    return ids


def _is_text(content: object) -> bool:
    if not isinstance(content, list):
        return True
    return all(isinstance(part, str) or part.get("type") == "text" for part in content)


def _check_room(prompt_tokens: int, most: int, *, reused: bool) -> None:
    """A prompt needs room for one token; as in vLLM an answer is cut at the context's end.

    vllm/renderers/params.py tokenizes a rendered prompt up to one token beyond the context;
    vllm/entrypoints/serve/utils/api_utils.py counts ids that are reused.
    """
    if reused and prompt_tokens > most:
        raise bad_request(
            f"Input length ({prompt_tokens}) exceeds model's maximum context length ({most})."
        )
    if prompt_tokens > most:
        least = "at least " if prompt_tokens == most + 1 else ""
        raise bad_request(
            f"This model's maximum context length is {most} tokens. However, your prompt contains "
            f"{least}{prompt_tokens} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    if prompt_tokens == most:
        raise bad_request("max_tokens must be at least 1, got 0.", "max_tokens")
