"""Types that several settings models share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvrouter.options.addresses import bare_address, parse_address
from kvrouter_store.connection.address import parse_url


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


def unique_addresses(items: list[str]) -> list[str]:
    """Addresses of engines in their one form; ValueError with the remedy."""
    return list(dict.fromkeys(parse_address(item) for item in items))


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


def checked_by_engine(highest: int, metavar: str) -> AfterValidator:
    """Check items for `by_engine`."""
    remedy = f"{{!r}}: give it as {metavar} or HOST:PORT={metavar}"

    def check(items: list[str]) -> list[str]:
        by_engine(items, highest, remedy)
        return items

    return AfterValidator(check)


def by_model(items: list[str], least: int = 0, remedy: str = "{}") -> dict[str, int]:
    """Numbers by model, from `NAME=NUMBER`.

    Raises:
        ValueError: one is less than `least`; `remedy` with the item filled in.
    """
    found: dict[str, int] = {}
    for item in items:
        model, _, number = item.rpartition("=")
        if not (model and number.isdecimal() and int(number) >= least):
            raise ValueError(remedy.format(item))
        found[model] = int(number)
    return found


def checked_by_model(least: int, metavar: str) -> AfterValidator:
    """Check items for `by_model`."""
    remedy = f"{{!r}}: give it as NAME={metavar}, with at least {least}"

    def check(items: list[str]) -> list[str]:
        by_model(items, least, remedy)
        return items

    return AfterValidator(check)


def _pairs(value: Any) -> Any:
    """The same as `split`; a mapping of YAML gives `NAME=VALUE`."""
    if isinstance(value, dict):
        return [f"{name}={number}" for name, number in value.items()]
    return split(value)


def _store_url(value: str | None) -> str | None:
    if value is not None:
        parse_url(value)
    return value


def _called(metavar: str) -> Any:
    return Field(json_schema_extra={"metavar": metavar})


Texts = Annotated[list[str], BeforeValidator(split)]
Addresses = Annotated[Texts, AfterValidator(unique_addresses), _called("URL")]
EnginePorts = Annotated[Texts, checked_by_engine(65535, "PORT"), _called("PORT")]
RankCounts = Annotated[Texts, checked_by_engine(4096, "COUNT"), _called("COUNT")]
_ByName = Annotated[
    list[str], BeforeValidator(_pairs, json_schema_input_type=list[str] | dict[str, int])
]
ModelCounts = Annotated[_ByName, checked_by_model(1, "COUNT"), _called("NAME=COUNT")]
ModelTokens = Annotated[_ByName, checked_by_model(0, "TOKENS"), _called("NAME=TOKENS")]
StoreTokenFile = Annotated[
    str,
    Field(description="File that holds the token of the store, in place of --store-token."),
]
StoreUrl = Annotated[str | None, AfterValidator(_store_url), _called("URL")]
Port = Annotated[int, Field(ge=0, le=65535)]
Percent = Annotated[int, Field(ge=0, le=100, json_schema_extra={"metavar": "PERCENT"})]
LogLevel = Literal["debug", "info", "warning", "error"]
