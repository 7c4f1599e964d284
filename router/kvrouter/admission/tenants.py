"""The tenant of a request, for the fair queue: the name of its key, or else its client's address.

A client could invent a new tenant for each request. So a header counts only if a trusted proxy
sends it.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Final

from kvrouter.access.callers import caller_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.http.server.exchange import Exchange

    Network = IPv4Network | IPv6Network

FORWARDED_FOR: Final = "x-forwarded-for"
_IPV6_BITS: Final = 64  # a customer has at least a /64, and all of its addresses (RFC 6177)
_REMEMBERED: Final = 4096


class Tenants:
    """Finds the tenant of a request; trusted `proxies` name it in `header` (lower case)."""

    def __init__(self, header: str, proxies: Sequence[Network] = ()) -> None:
        self.follow(header, proxies)

    def follow(self, header: str, proxies: Sequence[Network]) -> None:
        """Change the header and the proxies."""
        self._header, self._proxies = header, tuple(proxies)
        self._trusts = lru_cache(_REMEMBERED)(self._is_trusted)

    def of(self, exchange: Exchange) -> str:
        """The name of the request's key; without keys the address of its client.

        For a request of a trusted proxy the header replaces the address.
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
        """The client that the proxies name: each appends the address that it got the request from.

        The client itself may have written all addresses before the last one that is no proxy.
        """
        for address in reversed(headers.get(FORWARDED_FOR, "").split(",")):
            host = _without_port(address.strip())
            if not self._trusts(host):
                return host if _parsed(host) is not None else None
        return None

    def _is_trusted(self, host: str) -> bool:
        address = _parsed(host)
        return address is not None and any(address in network for network in self._proxies)


@lru_cache(_REMEMBERED)
def address_group(host: str) -> str:
    """The tenant of an address: the address itself, or the /64 of an IPv6 address."""
    address = _parsed(host)
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _IPV6_BITS), strict=False))
    return host if address is None else str(address)


def _parsed(host: str) -> IPv4Address | IPv6Address | None:
    """An address; the IPv4 address of an IPv4-mapped one."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _without_port(text: str) -> str:
    """The address in ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text
