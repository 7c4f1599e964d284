"""The JSON schema of a file of settings, for editors and deployment checks."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, BeforeValidator, ByteSize
from pydantic.json_schema import GenerateJsonSchema

from kvrouter.options.option import options

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def json_schema(command: str, model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of the files that `kvrouter COMMAND --config FILE` takes.

    A value that passes may still be refused for its meaning (a wrong address, two settings that
    exclude each other); `kvrouter config check` finds that too.
    """
    own = model.model_json_schema(schema_generator=_Generator)
    properties: dict[str, Any] = {}
    for option in options(model):
        member = _member(
            own["properties"][option.name], model.model_fields[option.name], option.default
        )
        properties[option.name] = {"description": option.help, **member}
        dashed = option.name.replace("_", "-")
        if dashed != option.name:
            properties[dashed] = {"$ref": f"#/properties/{option.name}"}
    definitions = {"$defs": own["$defs"]} if "$defs" in own else {}
    return {
        "$schema": DIALECT,
        "title": f"Settings of kvrouter {command}",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **definitions,
    }


class _Generator(GenerateJsonSchema):
    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        """Our own types are read from text."""
        return {"type": "string"}


def _member(schema: dict[str, Any], info: FieldInfo, text: str) -> dict[str, Any]:
    """The schema of one setting; `text` is its default in help."""
    rest = {key: value for key, value in schema.items() if key not in _NOT_OF_FILES}
    default = rest.pop("default", None)
    kind = info.annotation
    if rest.get("type") == "string" and isinstance(default, int | float):
        default = text  # a type of our own: 100ms, 0600
        if isinstance(kind, type) and issubclass(kind, float):
            rest["type"] = ["string", "number"]
    if _read_from_text(info) and rest.get("type") != "string":
        rest = {"anyOf": [rest, {"type": "string"}]}
    infinite = isinstance(default, float) and not isfinite(default)
    return rest if default is None or infinite else {**rest, "default": default}


_NOT_OF_FILES: Final = frozenset(
    {"title", "description", "flags", "section", "metavar", "positional"}
)


def _read_from_text(info: FieldInfo) -> bool:
    """Whether a value may also be a text: `8GiB`, `a,b`, `100ms`."""
    if any(isinstance(each, BeforeValidator) for each in info.metadata):
        return True
    kind = info.annotation
    return kind is ByteSize or getattr(kind, "__origin__", None) is list
