"""Numbers for all engines, or for one of them."""

from __future__ import annotations

from kvrouter.options.addresses import bare_address, parse_address


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
