"""Types that several settings models share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from kvrouter.options.addresses import bare_address, parse_address


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


def by_engine(items: list[str], highest: int = 65535, remedy: str = "{}") -> dict[str, int]:
    """Numbers by engine, from `NUMBER` (stored under "") and `HOST:PORT=NUMBER`.

    Raises:
        ValueError: one is not from 1 to `highest`; `remedy` with the item filled in.
    """
    found: dict[str, int] = {}
    for item in items:
        engine, _, number = item.rpartition("=")
        if not (number.isdecimal() and 0 < int(number) <= highest):
            raise ValueError(remedy.format(item))
        found[bare_address(parse_address(engine)) if engine else ""] = int(number)
    return found
