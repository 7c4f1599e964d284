"""What a request demands of its answer: the call of a function, or JSON. Pure.

By vLLM 0.32's rules: vllm/entrypoints/openai/chat_completion/protocol.py, `check_tool_usage`.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Any

from kvrouter.errors import bad_request
from kvrouter.openai.request import Kind
from kvrouter.tools.sim.schemas import json_of


@dataclass(frozen=True)
class Form:
    """What an answer is: JSON of one of the schemas.

    Attributes:
        schemas: those of arguments by the function's name, another one by "".
        required: whether the model chooses the function, by `tool_choice` "required".
    """

    schemas: Mapping[str, object]
    required: bool = False

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
