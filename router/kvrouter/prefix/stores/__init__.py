"""What the router asks of KV stores: matches and landings."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvrouter.prefix.stores.http_peer import HttpPeer
from kvrouter.prefix.stores.lmcache import LmcacheCatalogue, LmcacheOptions
from kvrouter.prefix.stores.mooncake import MooncakeCatalogue, MooncakeOptions
from kvrouter.prefix.stores.nodes import NodesView
from kvrouter.prefix.stores.polling import PollingView
from kvrouter_store.connection.address import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.prefix.stores.base import StoreView
    from kvrouter.prefix.stores.polling import Catalogue
    from kvrouter_store.client.asyncio_client import AsyncStoreClient

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


def foreign_store(url: str) -> PollingView:
    """The view of SCHEME://HOST:PORT?OPTION=VALUE; asks nothing yet.

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
    return PollingView(peer, make(peer, options))


def store_of(urls: Sequence[str], open_client: Callable[[str], AsyncStoreClient]) -> StoreView:
    """The view of the store that these URLs name, as `store_urls` returns them; asks nothing yet.

    `open_client` makes the client of a node.
    """
    if is_foreign(urls[0]):
        return foreign_store(urls[0])
    nodes = NodesView(open_client)
    nodes.follow(urls)
    return nodes


def store_urls(urls: list[str]) -> list[str]:
    """The URLs of one store, each in its one form; ValueError with the remedy."""
    found = list(dict.fromkeys(url if is_foreign(url) else str(parse_url(url)) for url in urls))
    for url in filter(is_foreign, found):
        foreign_store(url)
        if len(found) > 1:
            raise ValueError(f"{url} is a whole store: give no other --store beside it")
    return found
