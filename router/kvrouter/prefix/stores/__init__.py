"""What the router asks of KV stores: matches and landings."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvrouter.prefix.stores.lmcache import LmcacheCatalogue
from kvrouter.prefix.stores.mooncake import MooncakeCatalogue
from kvrouter.prefix.stores.polling import HttpPeer, PollingView
from kvrouter_store.connection.address import parse_url

if TYPE_CHECKING:
    from collections.abc import Mapping

FOREIGN: Final[Mapping[str, type[MooncakeCatalogue | LmcacheCatalogue]]] = MappingProxyType(
    {"mooncake": MooncakeCatalogue, "lmcache": LmcacheCatalogue}
)
"""Stores of other projects by the scheme of their URL, whose query sets the catalogue's fields."""


def is_foreign(url: str) -> bool:
    """Whether the URL names a store of another project."""
    return url.partition("://")[0] in FOREIGN


def foreign_store(url: str) -> PollingView:
    """The view of SCHEME://HOST:PORT?OPTION=VALUE; asks nothing yet.

    ValueError: it cannot be read, with the remedy.
    """
    parts = urlsplit(url)
    remedy = f"store address {url!r} is not understood; write {parts.scheme}://HOST:PORT"
    try:
        bare = parts.path in {"", "/"} and not parts.username and parts.hostname and parts.port
        options = dict(parse_qsl(parts.query))
        catalogue = msgspec.convert(options, FOREIGN[parts.scheme], strict=False)
    except ValueError:
        forms = FOREIGN[parts.scheme].forms
        raise ValueError(f"{remedy}?OPTION=VALUE, with options of {forms}") from None
    if not bare:
        raise ValueError(remedy)
    return PollingView(HttpPeer(url, catalogue.health_path, catalogue.server), catalogue)


def store_urls(urls: list[str]) -> list[str]:
    """The URLs of one store, each in its one form; ValueError with the remedy."""
    for scheme in (url.partition("://")[0] for url in urls):  # their URLs may hold passwords
        if scheme.startswith(("redis", "valkey", "infinistore")):
            raise ValueError(
                f"{scheme}:// is a tier below store nodes: give it to `kvrouter store --tier`, and "
                "kv://HOST:PORT of the nodes here"
            )
    found = list(dict.fromkeys(url if is_foreign(url) else str(parse_url(url)) for url in urls))
    for url in filter(is_foreign, found):
        foreign_store(url)
        if len(found) > 1:
            raise ValueError(f"{url} is a whole store: give no other --store beside it")
    return found
