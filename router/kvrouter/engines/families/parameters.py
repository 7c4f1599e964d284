"""The table parameter x leg for vLLM, which other families change.

It has every member of vLLM 0.32's completion and chat requests (a test compares the names with
vLLM's classes), and those of older and other engines. Unknown members are kept on both legs.
`python -m kvrouter.tools.docs.parameters` writes docs/parameters.md from these rows.
"""

from __future__ import annotations

from typing import Final

import orjson

from kvrouter.engines.families.parameter_table import (
    CHAT,
    COMPLETION,
    WHERE_NEGATIVE,
    Condition,
    Parameter,
    ParameterTable,
    Served,
    Tokenize,
    Treatment,
)

TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")
"""Members that name transfers to vLLM's engines."""


def steers(raw: bytes) -> bool:
    """Whether the JSON of `vllm_xargs` has a member that vLLM takes for one of `TRANSFERS`."""
    extra = orjson.loads(raw)
    return isinstance(extra, dict) and not extra.keys().isdisjoint(TRANSFERS)


def _kept(names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name) for name in names.split())


def _dropped(names: str, why: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, prefill=Treatment.DROPPED, why=why) for name in names.split())


def _alone(name: str, why: str) -> Parameter:
    return Parameter(name, served=Served.ALONE, why=why)


def _rendered(names: str, tokenize: Tokenize) -> tuple[Parameter, ...]:
    why = "it changes the prompt"
    return tuple(Parameter(name, CHAT, tokenize=tokenize, why=why) for name in names.split())


def steering(names: str) -> tuple[Parameter, ...]:
    """Members that steer transfers, which only the router may set."""
    own, why = Treatment.OWN, "it selects KV: a client's value would name another request's"
    return tuple(Parameter(name, prefill=own, decode=own, why=why) for name in names.split())


_WHOLE = "the whole prompt has to be computed where it is decoded"
_GRAMMAR = "a grammar would be compiled for a token that is discarded"

PROMPT: Final = (
    Parameter("model", tokenize=Tokenize.TAKES, why="blocks of an adapter have other hashes"),
    Parameter(
        "prompt",
        COMPLETION,
        tokenize=Tokenize.TAKES,
        why="token ids replace it once they are known, so it is tokenised once",
    ),
    *_rendered(
        "messages tools add_generation_prompt continue_final_message chat_template "
        "chat_template_kwargs media_io_kwargs mm_processor_kwargs",
        tokenize=Tokenize.TAKES,
    ),
    *_rendered("documents reasoning_effort", tokenize=Tokenize.BARS),
    Parameter(
        "tool_choice",
        CHAT,
        tokenize=Tokenize.BARS,
        default=b'"auto"',
        why="it decides whether the prompt shows the tools",
    ),
    Parameter(
        "response_format",
        tokenize=Tokenize.BARS,
        why="some chat templates show it to the model",
    ),
    Parameter("add_special_tokens", tokenize=Tokenize.TAKES, why="it changes the prompt"),
    Parameter(
        "truncate_prompt_tokens",
        served=Served.ALONE,
        when=WHERE_NEGATIVE,
        tokenize=Tokenize.BARS,
        why="negative values depend on `max_tokens`, which differs between the legs",
    ),
    Parameter("truncation_side", tokenize=Tokenize.BARS, why="it changes the prompt"),
    Parameter(
        "suffix",
        COMPLETION,
        served=Served.ALONE,
        tokenize=Tokenize.BARS,
        why="engines accept it with a text, not with token ids",
    ),
    Parameter("prompt_embeds", COMPLETION, served=Served.ALONE, tokenize=Tokenize.BARS, why=_WHOLE),
    Parameter(
        "cache_salt",
        why="it changes the block hashes; a 400: `@`, `/`, `\\`, NUL, more than 128 characters",
    ),
    *_kept("mm_payload return_mm_kwargs"),
)

LENGTH: Final = (
    Parameter("max_tokens", prefill=Treatment.SET, value=b"1"),
    Parameter("max_completion_tokens", CHAT, prefill=Treatment.SET_IF_GIVEN, value=b"1"),
    *_dropped("min_tokens", why="it would exceed `max_tokens`"),
    Parameter(
        "ignore_eos",
        prefill=Treatment.SET,
        value=b"true",
        why="an end mark as the first token would end the leg without KV",
    ),
    *_dropped("stop stop_token_ids bad_words", why="nothing may end the leg before its token"),
    *_kept("include_stop_str_in_output thinking_token_budget repetition_detection"),
)

CHOICES: Final = (
    *_dropped("n", why="the prefill leg needs one sample"),
    Parameter(
        "best_of",
        COMPLETION,
        prefill=Treatment.DROPPED,
        why="vLLM and SGLang use `n` alone",
    ),
    _alone("use_beam_search", why=_WHOLE),
    *_kept("length_penalty"),
)

SAMPLING: Final = (
    *_kept(
        "temperature top_p top_k min_p seed frequency_penalty presence_penalty "
        "repetition_penalty logit_bias allowed_token_ids watermarking",
    ),
    *_dropped(
        "structured_outputs guided_json guided_regex guided_choice guided_grammar "
        "guided_decoding_backend guided_whitespace_pattern",
        why=_GRAMMAR,
    ),
    Parameter("parallel_tool_calls", CHAT),
    Parameter("include_reasoning", CHAT),
)

ANSWER: Final = (
    Parameter("stream", prefill=Treatment.SET, value=b"false"),
    *_dropped("stream_options", why="refused without `stream`"),
    *_kept("stream_interval"),
    Parameter("echo", served=Served.ALONE, tokenize=Tokenize.BARS, why=f"{_WHOLE}, from its text"),
    *_dropped("logprobs logprob_token_ids", why="the leg's token is discarded"),
    Parameter("top_logprobs", CHAT, prefill=Treatment.DROPPED, why="refused without `logprobs`"),
    _alone("prompt_logprobs", why=_WHOLE),
    *_dropped("return_token_ids", why="the router sets it where it needs the ids"),
    Parameter(
        "return_prompt_text",
        CHAT,
        served=Served.ALONE,
        tokenize=Tokenize.BARS,
        why="engines render no text for token ids",
    ),
    *_dropped("routed_experts_prompt_start", why="the answer is discarded"),
    *_kept(
        "return_tokens_as_token_ids return_token_offsets skip_special_tokens "
        "spaces_between_special_tokens",
    ),
)

IDENTITY: Final = (
    Parameter("priority", why="`--prefill-priority` adds the work of the leg"),
    *_kept("user request_id session_id"),
)

TRANSFER: Final = (
    *steering(
        f"{' '.join(TRANSFERS)} bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key "
        "disagg_prefill_dp_rank disaggregated_params kv_hint kv_hints"
    ),
    Parameter(
        "vllm_xargs",
        served=Served.REFUSED,
        when=Condition("with `kv_transfer_params` or `ec_transfer_params` in it", steers),
        why="vLLM would use them as the router's own",
    ),
)

VLLM: Final = ParameterTable((*PROMPT, *LENGTH, *CHOICES, *SAMPLING, *ANSWER, *IDENTITY, *TRANSFER))
"""What engines of the vLLM families are sent."""
