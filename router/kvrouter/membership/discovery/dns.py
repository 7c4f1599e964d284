"""Engines of DNS: the addresses of a name with one port, or the SRV records of a service.

`loop.getaddrinfo` knows no SRV and no TTL, and hardly distinguishes a name that is gone from a
server that is down. So this uses dnspython, in a thread: it takes a tenth of a second to read an
answer of 64 KiB.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib import import_module
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import member_address

if TYPE_CHECKING:
    from dns.resolver import Answer, Resolver

    from kvrouter.membership.discovery.base import Listener

INTERVAL_S: Final = 5.0  # between two questions, unless the records' TTL is shorter
SHORTEST_S: Final = 1.0
DEADLINE_S: Final = 3.0  # for one question, over all servers
EMPTY_ANSWERS: Final = 3  # so many in a row without an engine mean that there is none any more
_QUESTION: Final[Any] = {"raise_on_no_answer": False, "lifetime": DEADLINE_S, "search": True}
_QUESTIONS: Final = 16  # in flight at a time, for the hosts of SRV records
_OPTIONS: Final = frozenset({"role", "interval", "resolver"})


class DnsSource:
    """Polls DNS for the addresses of engines.

    `dns://NAME:PORT?role=decode`: every A record of NAME is an engine at that port. AAAA records
    count only without A records, because with both one engine would be two.
    `srv://NAME?role=decode`: every SRV record is an engine, at its port and its host's address.
    Priorities and weights are ignored: the router's policy chooses.

    `role` is prefill, decode, both or store; `interval` is in seconds; `resolver=HOST:PORT`
    replaces the servers in resolv.conf.

    A server that is down or fails changes nothing. A name that is gone or has no records names no
    engine; a zone that is being reloaded may look so for a moment, so it counts the third time.

    ValueError: the URL is wrong, or dnspython is not installed.
    """

    def __init__(self, text: str) -> None:
        parts = urlsplit(text)
        options = _options(text, parts.query)
        self._srv = parts.scheme == "srv"
        self._host, self._port = _place(text, srv=self._srv)
        self._role = Role(options["role"])
        self._interval_s = float(options.get("interval", INTERVAL_S))
        given = options.get("resolver")
        self._servers = resolver_address(given) if given is not None else None
        self._modules()
        port = "" if self._srv else f":{self._port}"
        self.name = f"{parts.scheme}://{self._host}{port}?role={options['role']}"

    async def follow(self, listener: Listener) -> None:
        """See `EngineSource`. Reports within the interval or the records' TTL."""
        from dns.exception import DNSException  # noqa: PLC0415 - an extra

        known, empty = False, 0
        while True:
            wait_s = self._interval_s
            try:
                addresses, ttl_s = await self._ask()
            except (DNSException, OSError) as error:
                listener.failed(f"{self._host}: {' '.join(str(error).split())}")
            else:
                wait_s = pause_s(ttl_s=ttl_s, interval_s=self._interval_s)
                empty = 0 if addresses else empty + 1
                if addresses or not known or empty >= EMPTY_ANSWERS:
                    known = bool(addresses)
                    role = self._role
                    listener.named({member_address(each, role): role for each in addresses})
            await asyncio.sleep(wait_s)

    async def _ask(self) -> tuple[list[str], float]:
        """`HOST:PORT` of each engine, and the TTL in seconds; DNSException: DNS did not answer."""
        resolver = self._resolver()
        if self._srv:
            return await self._services(resolver)
        hosts, ttl_s = await self._hosts(resolver, self._host)
        return [f"{host}:{self._port}" for host in hosts], ttl_s

    async def _services(self, resolver: Resolver) -> tuple[list[str], float]:
        answer = await self._records(resolver, self._host, "SRV")
        if answer is None or answer.rrset is None:
            return [], self._interval_s
        offered = (r for r in answer.rrset if r.port and str(r.target) != ".")
        targets = [(str(r.target), r.port) for r in offered]
        found, ttls = [], [float(answer.rrset.ttl)]
        for at in range(0, len(targets), _QUESTIONS):
            some = targets[at : at + _QUESTIONS]
            questions = (self._hosts(resolver, host) for host, _ in some)
            answers = await asyncio.gather(*questions, return_exceptions=True)
            for (_, port), answered in zip(some, answers, strict=True):
                if isinstance(answered, BaseException):
                    raise answered
                hosts, ttl_s = answered
                # One record is one engine, even if its host has several addresses.
                found += [f"{host}:{port}" for host in hosts[:1]]
                ttls.append(ttl_s)
        return found, min(ttls)

    async def _hosts(self, resolver: Resolver, name: str) -> tuple[list[str], float]:
        for kind in ("A", "AAAA"):
            answer = await self._records(resolver, name, kind)
            if answer is not None and answer.rrset is not None:
                found = sorted(str(record.address) for record in answer.rrset)
                hosts = [f"[{host}]" if ":" in host else host for host in found]
                return hosts, float(answer.rrset.ttl)
        return [], self._interval_s

    async def _records(self, resolver: Resolver, name: str, kind: str) -> Answer | None:
        """The records of that kind; None: there is no such name."""
        from dns.resolver import NXDOMAIN  # noqa: PLC0415

        with suppress(NXDOMAIN):
            return await asyncio.to_thread(resolver.resolve, name, kind, **_QUESTION)
        return None

    def _resolver(self) -> Resolver:
        """A new one for each question, because resolv.conf may have changed."""
        made: Resolver = self._modules().Resolver(configure=self._servers is None)
        if self._servers is not None:
            made.nameservers = [self._servers[0]]
            made.port = self._servers[1]
        return made

    @staticmethod
    def _modules() -> Any:
        try:
            return import_module("dns.resolver")
        except ImportError:
            raise ValueError(
                "discovery by DNS needs dnspython: pip install 'kvrouter[dns]'"
            ) from None


def _options(text: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = options.keys() - _OPTIONS
    if unknown:
        known = ", ".join(sorted(_OPTIONS))
        raise ValueError(f"discovery {text!r}: no option {min(unknown)!r}; there are {known}")
    if options.get("role") not in set(Role):
        raise ValueError(f"discovery {text!r}: say ?role={' or ?role='.join(Role)}")
    interval = options.get("interval", "1")
    with suppress(ValueError):
        if 0 < float(interval) <= 3600:
            return options
    raise ValueError(f"discovery {text!r}: interval={interval} is no number of seconds up to 3600")


def _place(text: str, *, srv: bool) -> tuple[str, int]:
    """Name and port of a URL; port 0 for SRV, whose records have it."""
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = None
    plain = not (parts.path.strip("/") or parts.username or parts.fragment)
    if srv and plain and parts.hostname and ":" not in parts.netloc:
        return parts.hostname, 0
    if not srv and plain and parts.hostname and port:
        return parts.hostname, port
    form = "srv://_SERVICE._tcp.NAME?role=decode" if srv else "dns://NAME:PORT?role=decode"
    raise ValueError(f"discovery {text!r}: give it as {form}")


def resolver_address(text: str) -> tuple[str, int]:
    """IP address and port of a DNS server; the default port is 53; ValueError: it is none."""
    host, port = text, "53"
    if text.count(":") == 1 or "]:" in text:
        host, _, port = text.rpartition(":")
    host = host.strip("[]")
    with suppress(ValueError):
        if 0 < int(port) < 65536:
            return str(ip_address(host)), int(port)
    raise ValueError(f"resolver {text!r}: give it as ADDRESS or ADDRESS:PORT")


def pause_s(*, ttl_s: float, interval_s: float) -> float:
    """Seconds until the next question: by the TTL, but at least one; a shorter interval wins."""
    return min(interval_s, max(ttl_s, SHORTEST_S))
