"""Types that several settings models share."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvrouter.options.addresses import bare_address, parse_address
from kvrouter_store.connection.address import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable


def split(value: Any, between: str = r"[,\s]+") -> Any:
    """Split the texts of a list; `a,b` and `a b` are lists too."""
    if isinstance(value, str):
        return [part for part in re.split(between, value) if part]
    if isinstance(value, list):
        return [
            part
            for item in value
            for part in (split(item, between) if isinstance(item, str) else [str(item)])
        ]
    return value


def unique_addresses(items: list[str]) -> list[str]:
    """Addresses of engines in their one form; ValueError with the remedy."""
    return list(dict.fromkeys(parse_address(item) for item in items))


def unique_stores(items: list[str]) -> list[str]:
    """URLs of store nodes in their one form; ValueError with the remedy."""
    return list(dict.fromkeys(str(parse_url(item)) for item in items))


def by_engine(items: list[str]) -> dict[str, int]:
    """Numbers by engine, from `NUMBER` (stored under "") and `HOST:PORT=NUMBER`."""
    pairs = (item.rpartition("=") for item in items)
    return {bare_address(parse_address(e)) if e else "": int(number) for e, _, number in pairs}


def by_model(items: list[str]) -> dict[str, int]:
    """Numbers by model, from `NAME=NUMBER`."""
    return {model: int(number) for model, _, number in (item.rpartition("=") for item in items)}


def checked(read: Callable[[Any], object]) -> AfterValidator:
    """Check a value, unless there is none, by `read`, whose ValueError names the remedy."""

    def check(value: Any) -> Any:
        if value:
            read(value)
        return value

    return AfterValidator(check)


def _numbers(shape: str, allowed: range, form: str) -> AfterValidator:
    """Check that items have a shape (a regular expression) and end in an allowed number."""

    def read(items: list[str]) -> None:
        for item in items:
            if not (re.fullmatch(shape, item) and int(item.rpartition("=")[2]) in allowed):
                raise ValueError(f"{item!r}: give it as {form}")

    return checked(read)


def _pairs(value: Any) -> Any:
    """The same as `split`; a mapping of YAML gives `NAME=VALUE`."""
    if isinstance(value, dict):
        return [f"{name}={number}" for name, number in value.items()]
    return split(value)


def _called(metavar: str) -> Any:
    return Field(json_schema_extra={"metavar": metavar})


_ENGINES = r"(.*=)?\d+"
_MODELS = r".+=\d+"
_BEFORE_A_URL = r"[,\s]+(?=[\w+]+://|$)"  # in which there may be commas too

Texts = Annotated[list[str], BeforeValidator(split)]
Addresses = Annotated[Texts, AfterValidator(unique_addresses), _called("URL")]
EnginePorts = Annotated[
    Texts,
    _numbers(_ENGINES, range(1, 65536), "PORT or HOST:PORT=PORT"),
    checked(by_engine),
    _called("PORT"),
]
RankCounts = Annotated[
    Texts,
    _numbers(_ENGINES, range(1, 4097), "COUNT or HOST:PORT=COUNT"),
    checked(by_engine),
    _called("COUNT"),
]
_ByName = Annotated[
    list[str], BeforeValidator(_pairs, json_schema_input_type=list[str] | dict[str, int])
]
ModelCounts = Annotated[
    _ByName,
    _numbers(_MODELS, range(1, sys.maxsize), "NAME=COUNT, with at least 1"),
    _called("NAME=COUNT"),
]
ModelTokens = Annotated[
    _ByName,
    _numbers(_MODELS, range(sys.maxsize), "NAME=TOKENS, with at least 0"),
    _called("NAME=TOKENS"),
]
StoreUrls = Annotated[
    list[str],
    BeforeValidator(lambda value: split(value or [], _BEFORE_A_URL)),  # a file may say null
    _called("URL"),
]
StoreUrl = Annotated[str | None, checked(parse_url), _called("URL")]
Port = Annotated[int, Field(ge=0, le=65535)]
Percent = Annotated[int, Field(ge=0, le=100, json_schema_extra={"metavar": "PERCENT"})]
LogLevel = Literal["debug", "info", "warning", "error"]
