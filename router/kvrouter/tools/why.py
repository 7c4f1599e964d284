"""`kvrouter why`: asks a router what became of prompt tokens lately, or of those of one request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import quote, urlencode

import orjson
from pydantic import ByteSize, Field

from kvrouter.tools.status import StatusSettings, ask, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

_ADDRESS: Final = "start the router with --control-port, and give the URL of that with --url"
_NO_SIZES: Final = "No prompt has been counted yet: the router needs --store, and requests."
_UNKNOWN: Final = "give the x-request-id of an answer to one of its last requests"


class WhySettings(StatusSettings):
    """What to ask for, and which router."""

    removed: ClassVar[Mapping[str, str]] = {}

    url: str = Field(
        default="http://127.0.0.1:8001",
        description="URL of the router's control port.",
        json_schema_extra={"section": "Settings"},
    )
    request_id: str = Field(
        default="",
        description="Tell the story of this request (its x-request-id), not of all recent ones.",
        json_schema_extra={"positional": True, "metavar": "REQUEST-ID"},
    )
    model: str = Field(default="", description="Only requests for this model or alias.")
    key: str = Field(default="", description="Only requests with the API key of this name.")
    session: str = Field(
        default="",
        description="Only requests of this session, as its header names it.",
        json_schema_extra={"metavar": "ID"},
    )
    store_size: ByteSize | None = Field(
        default=None,
        description="Tell which share of the last day's prompt tokens a store of this size finds.",
    )


def run(settings: WhySettings) -> None:
    """Print what the router says. UsageError: it does not answer, or refuses."""
    if (size := settings.store_size) is not None:
        path = f"/store-size?bytes={int(size)}"
        found = orjson.loads(asyncio.run(ask(settings, path, _ADDRESS)))["found"]
        told = f"A store of {size.human_readable()} finds {found or 0:.1%} of the tokens."
        print(_NO_SIZES if found is None else told)
        return
    named = {name: getattr(settings, name) for name in ("model", "key", "session")}
    query = urlencode({name: value for name, value in named.items() if value})
    path, remedy = f"/why?{query}", _ADDRESS
    if settings.request_id:
        path, remedy = f"/why/{quote(settings.request_id, safe='')}", f"{_UNKNOWN}, or {_ADDRESS}"
    text = asyncio.run(ask(settings, path, remedy)).decode("utf-8", "replace")
    print("\n".join(map(printable, text.splitlines())))
