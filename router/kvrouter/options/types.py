"""Types that several settings models share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator


def split(value: Any) -> Any:
    """Split the texts of a list; `a,b` and `a b` are lists too."""
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
