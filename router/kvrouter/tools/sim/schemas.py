"""JSON that fits a schema, drawn at random. Pure.

Of a keyword that is not known here, a schema is refused. A property that may be left out is left
out where it would be too deep or has such a schema.

`Form` is what a request demands of its answer: the call of a function, or JSON. By vLLM 0.32's
rules: vllm/entrypoints/openai/chat_completion/protocol.py, `check_tool_usage`.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, floor, inf
from random import Random
from typing import TYPE_CHECKING, Any, Final

from kvrouter.errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.openai.request import Kind

_MOST_LEVELS: Final = 64
_FULL_LEVELS: Final = 10
_MOST_VALUES: Final = 10_000
_WORDS: Final = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "hazel", "iris")
_FORMATS: Final = {
    "date": "2026-05-17",
    "date-time": "2026-05-17T12:30:00Z",
    "email": "amber@example.com",
    "time": "12:30:00Z",
    "uri": "https://example.com/amber",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
}
_REMARKS: Final = {"$schema", "$defs", "definitions", "title", "description", "default", "examples"}
_ALONE: Final = ("$ref", "anyOf", "oneOf", "const", "enum")  # but for a type, and remarks
_KNOWN: Final = (
    {"type", "properties", "required", "additionalProperties", "items", "prefixItems"}
    | {"minItems", "maxItems", "uniqueItems", "format", "minLength", "maxLength"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)


@dataclass(frozen=True)
class Form:
    """What an answer is: JSON of one of the schemas."""

    schemas: Mapping[str, object]  # those of arguments by the function's name, another one by ""
    required: bool = False  # whether the model chooses the function, by `tool_choice` "required"

    def draw(self, prompt: list[int], seed: int | None) -> tuple[str, str]:
        """The function's name, and JSON; the same for the same prompt and seed. ApiError: 400."""
        random = Random(sha256(array("I", prompt).tobytes() + str(seed).encode()).digest())
        name = random.choice(list(self.schemas))
        return name, json_of(self.schemas[name] or {"type": "object"}, random)


def form_of(data: Mapping[str, Any], kind: Kind) -> Form | None:
    """What a request demands; None: any text. Raises ApiError: 400."""
    try:
        called = _called(data) if kind == "chat" else None
        return called or _structured(data.get("response_format"), data.get("structured_outputs"))
    except (AttributeError, LookupError, TypeError) as error:
        raise bad_request(f"tools, tool_choice or response_format: {error!r}") from None


def _called(data: Mapping[str, Any]) -> Form | None:
    tools, choice = data.get("tools"), data.get("tool_choice")
    functions = [tool["function"] for tool in tools or ()]
    schemas = {one["name"]: one.get("parameters", one.get("input_schema")) for one in functions}
    if tools == [] or not all(isinstance(name, str) and name for name in schemas):
        raise bad_request("`tools` must be functions with names, one at least.", "tools")
    if choice in (None, "none") or (choice == "auto" and schemas):
        return None
    if not schemas:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "required":
        return Form(schemas, required=True)
    if not isinstance(choice, dict) or choice["function"]["name"] not in schemas:
        raise bad_request("`tool_choice` names none of the specified `tools`.", "tool_choice")
    return Form({name: schemas[name] for name in [choice["function"]["name"]]})


def _structured(wanted: Any, ordered: Any) -> Form | None:
    kind = wanted["type"] if wanted else "text"
    if kind == "json_schema":
        return Form({"": wanted["json_schema"]["schema"]})
    if kind not in ("text", "json_object"):
        raise bad_request(f"The simulator has no {kind}.", "response_format")
    for name in ("regex", "choice", "grammar", "structural_tag"):
        if ordered and ordered.get(name) is not None:
            raise bad_request(f"The simulator has no {name}.", "structured_outputs")
    if kind == "json_object" or (ordered and ordered.get("json_object")):
        return Form({"": {"required": ["answer"]}})
    return Form({"": ordered["json"]}) if ordered and ordered.get("json") is not None else None


def json_of(schema: object, random: Random) -> str:
    """JSON in ASCII that fits `schema`; the same for the same state of `random`.

    Raises:
        ApiError: 400: the schema is none, or nothing of bounded size is known to fit.
    """
    try:
        root = json.loads(schema) if isinstance(schema, str) else schema
        return json.dumps(_Draw(root, random).value(root, 0))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise _refused(repr(error)) from None


def _refused(what: str) -> ApiError:
    return bad_request(f"The simulator has no JSON for this schema: {what[:200]}.")


class _Draw:
    """Draws one value. What is no schema raises what Python says of it."""

    def __init__(self, root: object, random: Random) -> None:
        self._root = root
        self._random = random
        self._left = _MOST_VALUES

    def value(self, schema: Any, level: int) -> Any:
        """A value; `level`: schemas around it."""
        self._left -= 1
        if level > _MOST_LEVELS or self._left < 0:
            raise _refused("it is too deep or too large")
        if schema is True:
            return self._random.choice(_WORDS)
        alone = next((name for name in _ALONE if name in schema), "")
        known = {alone, "type"} if alone else _KNOWN
        if unknown := sorted(schema.keys() - _REMARKS - known):
            raise _refused(f"it has `{unknown[0]}`")
        if alone:
            return self._alone(alone, schema[alone], level + 1)
        return self._typed(schema.get("type"), schema, level + 1)

    def _full(self, level: int) -> bool:
        """Whether there is room for what a schema does not require."""
        return level <= _FULL_LEVELS and self._left > _MOST_VALUES // 2

    def _alone(self, name: str, given: Any, level: int) -> Any:
        if name == "$ref":
            found: Any = {"#": self._root}
            for step in given.split("/"):
                found = found[step.replace("~1", "/").replace("~0", "~")]
            return self.value(found, level)
        if name in ("const", "enum"):
            value = given if name == "const" else self._random.choice(given)
            self._left -= len(json.dumps(value)) // 16
            return value
        self._left -= len(given)
        options = self._random.sample(given, len(given))
        if not self._full(level):
            options.sort(key=lambda one: "$ref" in one)
        for option in options[:-1]:
            try:
                return self.value(option, level)
            except ApiError:
                continue
        return self.value(options[-1], level)

    def _typed(self, kind: Any, schema: dict[str, Any], level: int) -> Any:
        if isinstance(kind, list):
            return self._typed(self._random.choice(kind), schema, level)
        if kind is None:
            kind = "object" if {"properties", "required"} & schema.keys() else "string"
        if kind == "null":
            return None
        if kind == "boolean":
            return self._random.random() < 0.5
        if kind in ("integer", "number"):
            return self._number(schema, 1 if kind == "integer" else 0)
        draws = {"array": self._array, "object": self._object, "string": self._string}
        return draws[kind](schema, level)

    def _number(self, schema: dict[str, Any], step: int) -> float:
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        low = max(schema.get("minimum", -inf), -inf if above is None else above + step)
        high = min(schema.get("maximum", inf), inf if below is None else below - step)
        low = min(0, high - 100) if low == -inf else low
        high = low + 100 if high == inf else high
        if step:
            return self._random.randint(ceil(low), floor(high))
        if low > high or (low == high and low in (above, below)):
            raise _refused("no number is in a range")
        number = low + (high - low) * self._random.uniform(0.1, 0.9)
        shown = round(number, 2)
        return float(shown if low < shown < high else number)

    def _string(self, schema: dict[str, Any], level: int) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", _MOST_VALUES)
        form = _FORMATS.get(schema.get("format", ""))
        if least > min(most, _MOST_VALUES) or (form and not least <= len(form) <= most):
            raise _refused("a length of a string")
        self._left -= least // 4
        text = form or self._random.choice(_WORDS)
        while len(text) < least:
            text += " " + self._random.choice(_WORDS)
        return str(text[:most])

    def _array(self, schema: dict[str, Any], level: int) -> list[Any]:
        prefix, others = schema.get("prefixItems", []), schema.get("items", True)
        unique = schema.get("uniqueItems", False)
        usual = len(prefix) or (2 - unique if self._full(level) else 0)
        values: list[Any] = []
        while len(values) < min(max(schema.get("minItems", 0), usual), schema.get("maxItems", inf)):
            at = len(values)
            value = self.value(prefix[at] if at < len(prefix) else others, level)
            if not (unique and value in values):
                values.append(value)
        return values

    def _object(self, schema: dict[str, Any], level: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        values: dict[str, Any] = {}
        for name in (*properties, *sorted(required - properties.keys())):
            self._left -= 1 + len(name) // 16
            try:
                if name in required or self._full(level):
                    values[name] = self.value(properties.get(name, others), level)
            except ApiError:
                if name in required:
                    raise
        if isinstance(others, dict) and not properties and self._full(level):
            values[self._random.choice(_WORDS)] = self.value(others, level)
        return values
