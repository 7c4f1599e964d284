"""Endpoints of engines that the router serves: with legs, or passed through to one engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
WITH_LEGS: Final = frozenset({COMPLETIONS, CHATS})
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
GENERATION: Final = WITH_LEGS | {RESPONSES, MESSAGES}
"""Endpoints that generate text; an engine that only embeds or scores has none of them."""
SALTABLE: Final = WITH_LEGS | {RESPONSES}
"""Those where engines of vLLM and SGLang read a `cache_salt`, if they do not list which."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of engines."""

    path: str  # where it is
    about: str  # what it does, in one sentence
    method: str = "POST"  # with which it is asked
    again: bool = True  # whether another engine may be asked after one that may have begun
    generates: bool = False  # whether engines compute a prompt for it
    computes: bool = True  # whether engines run their model for it
    # The least that its body has: names and an example, for the OpenAPI document.
    members: dict[str, object] = field(default_factory=dict)


_ASKED: Final[dict[str, object]] = {"messages": [{"role": "user", "content": "a"}]}
_PAIR: Final[dict[str, object]] = {"text_1": "a", "text_2": "b"}
_RANKED: Final[dict[str, object]] = {"query": "a", "documents": ["b"]}
ENDPOINTS: Final = (
    Endpoint(
        "/tokenize",
        "Token ids of a prompt or of messages.",
        computes=False,
        members={"prompt": "a"},
    ),
    Endpoint("/detokenize", "The text of token ids.", computes=False, members={"tokens": [1]}),
    Endpoint("/v1/embeddings", "Embeddings of texts.", members={"input": "a"}),
    Endpoint(
        RESPONSES,
        "OpenAI's responses; both legs, or one engine.",
        again=False,
        generates=True,
        members={"input": "a"},
    ),
    Endpoint(
        MESSAGES,
        "Anthropic's messages; both legs, or one engine.",
        again=False,
        generates=True,
        members={**_ASKED, "max_tokens": 1},
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        "Tokens of Anthropic's messages.",
        computes=False,
        members=_ASKED,
    ),
    Endpoint("/v1/rerank", "Documents by how well they answer a query.", members=_RANKED),
    Endpoint("/rerank", "The same as /v1/rerank.", members=_RANKED),
    Endpoint("/v1/score", "How alike texts are.", members=_PAIR),
    Endpoint("/score", "The same as /v1/score.", members=_PAIR),
    Endpoint("/tokenizer_info", "The tokenizer of a model.", method="GET", computes=False),
)
PASSED_THROUGH: Final = {one.path: one for one in ENDPOINTS}
"""Those that one decode engine answers, by path."""
LOAD: Final = "/load"  # where each engine says how many requests it has
KNOWN: Final = GENERATION | PASSED_THROUGH.keys() | {LOAD}
"""What the router serves of an engine that lists nothing."""
OTHER: Final = Endpoint("other", "What else engines list.", again=False)
"""Any other POST below /v1/ that an engine lists."""
BELOW: Final = "/v1/"
_BODIES: Final = {
    "application/json",
    "multipart/form-data",
    "application/x-www-form-urlencoded",  # what FastAPI calls the forms of vLLM that hold a file
}
_OPERATORS: Final = re.compile(
    r"load|lora|adapter|/models?(/|$)|admin|cache|weight|memory|/(files|batches|fine_tuning|mcp)(/|$)"
)
"""In a path: it may change an engine for all clients, or keep what only that engine has."""


def endpoint_at(path: str) -> Endpoint:
    """What one engine answers at `path`."""
    return PASSED_THROUGH.get(path, OTHER)


def _is_served(operation: object) -> bool:
    """Whether an operation of an OpenAPI document takes JSON or a form, or does not say."""
    if not isinstance(operation, dict):
        return False
    taken = operation.get("requestBody")
    content = taken.get("content") if isinstance(taken, dict) else None
    return not isinstance(content, dict) or not _BODIES.isdisjoint(content)


def listed(paths: Mapping[str, object]) -> frozenset[str]:
    """What the router serves of `paths` in an engine's OpenAPI document."""
    others = {
        path
        for path, methods in paths.items()
        if path.startswith(BELOW) and "{" not in path and not _OPERATORS.search(path)
        if isinstance(methods, dict) and _is_served(methods.get("post"))
    }
    known = KNOWN & paths.keys()
    return known | others if known - {LOAD} else frozenset()


def salted(document: Mapping[str, object]) -> frozenset[str]:
    """Paths of an OpenAPI document that read a `cache_salt`: those of others would drop it."""
    paths, schemas = document.get("paths"), _inner(document, "components", "schemas")
    body = ("post", "requestBody", "content", "application/json", "schema")
    return frozenset(
        path
        for path, methods in (paths if isinstance(paths, dict) else {}).items()
        if _names_salt(_inner(methods, *body), schemas)
    )


def _names_salt(schema: Mapping[str, object], schemas: Mapping[str, object]) -> bool:
    """Whether a body may have it, of whichever kind the body is."""
    kinds = schema.get("anyOf")
    if isinstance(kinds, list) and kinds:
        return all(isinstance(kind, dict) and _names_salt(kind, schemas) for kind in kinds)
    name = schema.get("$ref")
    named = _inner(schemas, name.rpartition("/")[2]) if isinstance(name, str) else schema
    return "cache_salt" in _inner(named, "properties")


def _inner(value: object, *names: str) -> Mapping[str, object]:
    """An object inside of others; empty if it is not there."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
