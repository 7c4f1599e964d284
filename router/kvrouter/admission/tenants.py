"""Whose request it is, for the fair queue: a key's name, or else an address that nobody can choose.

What a client writes into a header is its own choice: another name for each request would be
another place in the queue for each. So headers count only where a trusted proxy sends them.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Final

from kvrouter.access.callers import caller_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from ipaddress import IPv4Network

    from kvrouter.http.server.exchange import Exchange

    Network = IPv4Network | IPv6Network

FORWARDED_FOR: Final = "x-forwarded-for"
_IPV6_BITS: Final = 64
"""One customer has a /64 at least, and every address in it (RFC 6177)."""
_REMEMBERED: Final = 4096


class Tenants:
    """Tells tenants apart.

    Args:
        header: name of the header, in lower case, by which trusted proxies name tenants.
        proxies: networks of these proxies; both may change by `follow`.
    """

    def __init__(self, header: str, proxies: Sequence[Network] = ()) -> None:
        self.follow(header, proxies)

    def follow(self, header: str | None = None, proxies: Sequence[Network] | None = None) -> None:
        """Another header, or other proxies, from now on."""
        if header is not None:
            self._header = header
        if proxies is not None:
            self._proxies = tuple(proxies)
            self._trusts = lru_cache(_REMEMBERED)(self._is_trusted)

    def of(self, exchange: Exchange) -> str:
        """The tenant of a request: the name of its key, where there are keys.

        Else the address of its client; of a trusted proxy's what its header says.
        """
        caller = caller_of(exchange)
        if caller is not None:
            return caller.name
        host = exchange.peer.rpartition(":")[0]
        if not self._proxies or not self._trusts(host):
            return address_group(host)
        named = exchange.headers.get(self._header)
        if named and self._header != FORWARDED_FOR:
            return named
        return address_group(self._forwarded(exchange.headers) or host)

    def _forwarded(self, headers: Mapping[str, str]) -> str | None:
        """The client that trusted proxies tell of: each adds whom it has the request from.

        What stands before the last address that is no proxy's, the client itself may have written.
        """
        for told in reversed(headers.get(FORWARDED_FOR, "").split(",")):
            host = _without_port(told.strip())
            if not self._trusts(host):
                return host if _parsed(host) is not None else None
        return None

    def _is_trusted(self, host: str) -> bool:
        address = _parsed(host)
        return address is not None and any(address in network for network in self._proxies)


@lru_cache(_REMEMBERED)
def address_group(host: str) -> str:
    """The tenant that an address belongs to: itself, of IPv6 its network of 64 bits."""
    address = _parsed(host)
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _IPV6_BITS), strict=False))
    return host if address is None else str(address)


def _parsed(host: str) -> IPv4Address | IPv6Address | None:
    """An address; an IPv4 one also where it came over an IPv6 socket."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _without_port(told: str) -> str:
    """An address as proxies write it: alone, as HOST:PORT or as [HOST]:PORT."""
    if told.startswith("["):
        return told[1:].partition("]")[0]
    return told.partition(":")[0] if told.count(":") == 1 else told
