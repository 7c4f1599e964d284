"""What the router asks of KV stores: matches and landings."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvrouter.prefix.stores.http_peer import HttpPeer
from kvrouter.prefix.stores.lmcache import LmcacheCatalogue, LmcacheOptions
from kvrouter.prefix.stores.mooncake import MooncakeCatalogue, MooncakeOptions
from kvrouter.prefix.stores.polling import PollingView
from kvrouter_store.connection.address import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.prefix.stores.polling import Catalogue

    Kind = tuple[Callable[[HttpPeer, Any], Catalogue], type[msgspec.Struct], str]

FOREIGN: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "mooncake": (MooncakeCatalogue, MooncakeOptions, "/batch_query_keys?keys=-"),
        "lmcache": (LmcacheCatalogue, LmcacheOptions, "/directory/stats"),
    }
)
"""Stores of other projects by the scheme of their URL; a new one is one line here.

What asks them, the options in the query of the URL, and a page that answers 200 while they can be
asked.
"""


def is_foreign(url: str) -> bool:
    """Whether the URL names a store of another project."""
    return url.partition("://")[0] in FOREIGN


def foreign_store(url: str) -> tuple[HttpPeer, PollingView]:
    """The client and the view of SCHEME://HOST:PORT?OPTION=VALUE; asks nothing yet.

    ValueError: it cannot be read, with the remedy.
    """
    parts = urlsplit(url)
    make, kind, health_path = FOREIGN[parts.scheme]
    remedy = f"store address {url!r} is not understood; write {parts.scheme}://HOST:PORT"
    try:
        bare = parts.path in {"", "/"} and not parts.username and parts.hostname and parts.port
        options = msgspec.convert(dict(parse_qsl(parts.query)), kind, strict=False)
    except ValueError as error:
        raise ValueError(f"{remedy}?OPTION=VALUE ({error})") from None
    if not bare:
        raise ValueError(remedy)
    peer = HttpPeer(url, f"http://{parts.netloc}", health_path)
    return peer, PollingView(make(peer, options))


def check_store(url: str) -> None:
    """Raise ValueError, with the remedy, where no store has such a URL."""
    if is_foreign(url):
        foreign_store(url)
    else:
        parse_url(url)
