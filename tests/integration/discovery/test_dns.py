"""DNS: many records, both kinds of addresses, names that are gone, servers that do not answer."""

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.fakes.discovery import LOOK_S, dns_server
from tests.fakes.dns_server import DnsServer
from tests.integration.discovery.conftest import Heard, followed

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery import dns as dns_records
from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.dns import EMPTY_ANSWERS

NAME, SERVICE = "decode.test.", "_engine._tcp.decode.test."


@pytest_asyncio.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with dns_server() as started:
        yield started


def addresses(server: DnsServer, role: str = "decode") -> str:
    return f"dns://{NAME}:8000?role={role}&resolver={server.resolver}&interval={LOOK_S}"


def services(server: DnsServer) -> str:
    return f"srv://{SERVICE}?role=prefill&resolver={server.resolver}&interval={LOOK_S}"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.BOTH])
async def test_the_url_says_the_role(server: DnsServer, role: Role) -> None:
    server.set(NAME, "A", "127.0.0.1")
    async with followed(make_source(addresses(server, role.value))) as heard:
        await heard.names({"127.0.0.1:8000": role})


async def test_more_addresses_than_fit_a_datagram_are_all_named(server: DnsServer) -> None:
    hosts = [f"10.1.{n // 250}.{n % 250}" for n in range(500)]
    server.set(NAME, "A", *hosts)
    async with followed(make_source(addresses(server))) as heard:
        await heard.names({f"{host}:8000": Role.DECODE for host in hosts})


async def test_ipv6_addresses_count_where_there_are_no_others(server: DnsServer) -> None:
    server.set(NAME, "AAAA", "2001:db8::1")
    async with followed(make_source(addresses(server))) as heard:
        await heard.names({"[2001:db8::1]:8000": Role.DECODE})
        server.set(NAME, "A", "10.0.0.1")
        await heard.names({"10.0.0.1:8000": Role.DECODE})


async def test_services_have_ports_of_their_own(server: DnsServer) -> None:
    server.set("one.test.", "A", "10.0.0.1")
    server.set("six.test.", "AAAA", "2001:db8::6")
    server.set("two.test.", "A", "10.0.0.2", "10.0.9.2")  # one engine, at one of its addresses
    records = ("0 0 8001 one.test.", "0 0 8002 one.test.", "9 9 80 two.test.", "0 0 6 six.test.")
    server.set(SERVICE, "SRV", *records, "0 0 8000 gone.test.")
    async with followed(make_source(services(server))) as heard:
        named = ("10.0.0.1:8001", "10.0.0.1:8002", "10.0.0.2:80", "[2001:db8::6]:6")
        await heard.names(dict.fromkeys(named, Role.PREFILL))


async def test_a_service_without_a_port_is_no_engine(server: DnsServer) -> None:
    server.set("one.test.", "A", "10.0.0.1")
    server.set(SERVICE, "SRV", "0 0 0 one.test.", "0 0 8001 one.test.")
    async with followed(make_source(services(server))) as heard:
        await heard.names({"10.0.0.1:8001": Role.PREFILL})


async def test_many_services_are_all_asked_for(server: DnsServer) -> None:
    for n in range(40):
        server.set(f"h{n}.test.", "A", f"10.0.0.{n}")
    server.set(SERVICE, "SRV", *(f"0 0 8000 h{n}.test." for n in range(40)))
    async with followed(make_source(services(server))) as heard:
        await heard.names({f"10.0.0.{n}:8000": Role.PREFILL for n in range(40)})


async def test_a_service_that_is_not_offered_has_no_engines(server: DnsServer) -> None:
    server.set(SERVICE, "SRV", "0 0 0 .")
    async with followed(make_source(services(server))) as heard:
        await heard.names({})


@pytest.mark.parametrize("how", ["no records", "no such name"])
async def test_a_name_without_engines_must_say_so_several_times(
    server: DnsServer, how: str
) -> None:
    server.set(NAME, "A", "10.0.0.1")
    async with followed(make_source(addresses(server))) as heard:
        await heard.names({"10.0.0.1:8000": Role.DECODE})
        asked, words = server.asked, heard.words
        if how == "no records":
            server.set(NAME, "A")
        else:
            server.forget(NAME)
        await heard.until(lambda: heard.words > words and not heard.members)
        # Each time it was asked for A and then for AAAA.
        assert server.asked >= asked + 2 * EMPTY_ANSWERS


async def test_a_name_that_is_gone_for_a_moment_changes_nothing(server: DnsServer) -> None:
    server.set(NAME, "A", "10.0.0.1")
    async with followed(make_source(addresses(server))) as heard:
        await heard.names({"10.0.0.1:8000": Role.DECODE})
        real, emptied = server.answer, 0

        def forgetful(question: bytes, limit: int) -> bytes | None:
            """Twice in a row there is no such name, then it is there again."""
            nonlocal emptied
            emptied += 1
            if emptied == 1:
                server.forget(NAME)
            if emptied == 1 + 2 * (EMPTY_ANSWERS - 1):
                server.set(NAME, "A", "10.0.0.1", "10.0.0.2")
            return real(question, limit)

        server.answer = forgetful  # type: ignore[method-assign]
        said: list[object] = []
        record(heard, said)
        await heard.names({"10.0.0.1:8000": Role.DECODE, "10.0.0.2:8000": Role.DECODE})
        assert {} not in said


def record(heard: Heard, said: list[object]) -> None:
    """Note all that is named from now on."""
    real = heard.named

    def named(members: object, *, restore: bool = False) -> None:
        said.append(members)
        real(members, restore=restore)  # type: ignore[arg-type]

    heard.named = named  # type: ignore[method-assign]


async def test_a_server_that_says_nothing_is_away(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_records, "DEADLINE_S", 0.2)  # what passes is the deadline itself
    server.mood = "silent"
    async with followed(make_source(addresses(server))) as heard:
        assert NAME in await heard.complains()
        server.set(NAME, "A", "10.0.0.1")
        server.mood = "answers"
        await heard.names({"10.0.0.1:8000": Role.DECODE})


async def test_half_of_an_answer_is_none(server: DnsServer) -> None:
    """Where one host of a service cannot be asked for, the others' engines stay as well."""
    server.set("one.test.", "A", "10.0.0.1")
    server.set("two.test.", "A", "10.0.0.2")
    server.set(SERVICE, "SRV", "0 0 1 one.test.", "0 0 2 two.test.")
    async with followed(make_source(services(server))) as heard:
        members = {"10.0.0.1:1": Role.PREFILL, "10.0.0.2:2": Role.PREFILL}
        await heard.names(members)
        real = server.answer

        def lame(question: bytes, limit: int) -> bytes | None:
            server.mood = "fails" if b"\x03two" in question else "answers"
            return real(question, limit)

        server.answer = lame  # type: ignore[method-assign]
        assert "two.test" in await heard.complains()
        assert heard.members == members


def test_a_source_is_asked_as_often_as_its_records_say() -> None:
    assert dns_records.pause_s(ttl_s=3.0, interval_s=5.0) == 3.0
    assert dns_records.pause_s(ttl_s=300.0, interval_s=5.0) == 5.0
    assert dns_records.pause_s(ttl_s=0.0, interval_s=5.0) == 1.0
    assert dns_records.pause_s(ttl_s=3.0, interval_s=0.5) == 0.5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("dns://name?role=decode", "give it as dns://NAME:PORT?role=decode"),
        ("dns://:80?role=decode", "give it as dns://NAME:PORT?role=decode"),
        ("dns://name:80/path?role=decode", "give it as dns://"),
        ("dns://name:99999?role=decode", "give it as dns://"),
        ("srv://name:80?role=decode", "give it as srv://_SERVICE._tcp.NAME?role=decode"),
        ("dns://name:80", "say ?role=prefill or ?role=decode or ?role=both or ?role=store"),
        ("dns://name:80?role=regular", "say ?role=prefill"),
        ("dns://name:80?role=decode&intervall=3", "no option 'intervall'; there are interval"),
        ("dns://name:80?role=decode&interval=0", "interval=0 is no number of seconds"),
        ("dns://name:80?role=decode&interval=soon", "interval=soon is no number of seconds"),
        ("dns://name:80?role=decode&resolver=10.0.0.1:x", "give it as ADDRESS or ADDRESS:PORT"),
        ("dns://name:80?role=decode&resolver=ns.example", "give it as ADDRESS or ADDRESS:PORT"),
    ],
)
def test_an_error_names_what_is_wrong_with_a_url(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"role|give it|option|interval") as told:
        make_source(text)
    assert complaint in str(told.value)


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("10.0.0.1", ("10.0.0.1", 53)),
        ("10.0.0.1:8600", ("10.0.0.1", 8600)),
        ("::1", ("::1", 53)),
        ("[::1]", ("::1", 53)),
        ("[::1]:8600", ("::1", 8600)),
    ],
)
def test_a_resolver_is_an_address_with_or_without_a_port(
    text: str, server: tuple[str, int]
) -> None:
    assert dns_records.resolver_address(text) == server


def test_without_dnspython_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.resolver", None)
    with pytest.raises(ValueError, match=r"pip install 'kvrouter\[dns\]'"):
        make_source("dns://name:80?role=decode")
