"""Types of settings that several groups of settings share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator


def split(value: Any) -> Any:
    """A list may be written `a,b` or `a b` (environment), or as a list (flags, YAML)."""
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if isinstance(value, list):
        return [
            part
            for item in value
            for part in (split(item) if isinstance(item, str) else [str(item)])
        ]
    return value


Texts = Annotated[list[str], BeforeValidator(split)]
