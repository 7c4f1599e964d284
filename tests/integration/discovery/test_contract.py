"""What every source of engines does; one that cannot fail is excused from failing."""

import asyncio

import pytest
from tests.fakes.discovery import KINDS, Backend, DnsBackend, FlagsBackend
from tests.integration.discovery.conftest import followed

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery import SOURCES, make_source

A, B, C = "127.0.0.1:8000", "127.0.0.2:8000", "127.0.0.3:8000"


def of(backend: Backend, *addresses: str) -> dict[str, Role]:
    """These engines, in roles that such a source can name."""
    roles = backend.roles
    return {address: roles[at % len(roles)] for at, address in enumerate(addresses)}


def breakable(backend: Backend) -> Backend:
    if isinstance(backend, FlagsBackend):
        pytest.skip("does not apply: flags cannot fail")
    return backend


def test_every_kind_of_source_is_held_to_this_contract() -> None:
    assert set(KINDS) == {*SOURCES, "flags"}


async def test_its_first_report_comes_without_a_change(backend: Backend) -> None:
    async with followed(backend.source()) as heard:
        await heard.names({})


async def test_it_names_all_engines_that_there_are(backend: Backend) -> None:
    members = of(backend, A, B, C)
    await backend.name(members)
    async with followed(backend.source()) as heard:
        await heard.names(members)


async def test_it_names_a_node_of_the_store_by_its_url(backend: Backend) -> None:
    node, setting = "kv://127.0.0.4:8000", backend.setting
    source = backend.source()
    if isinstance(backend, DnsBackend):
        source = make_source(setting.replace("role=decode", "role=store"))
        await backend.name({"127.0.0.4:8000": Role.DECODE})
    else:
        await backend.name({node: Role.STORE})
    async with followed(source) as heard:
        await heard.names({node: Role.STORE})
        await backend.name({})
        await heard.names({})


async def test_engines_come_and_go(backend: Backend) -> None:
    async with followed(backend.source()) as heard:
        for addresses in ((A,), (A, B, C), (B, C), (C, A), ()):
            members = of(backend, *addresses)
            await backend.name(members)
            await heard.names(members)


async def test_an_engine_can_have_another_role(backend: Backend) -> None:
    if len(backend.roles) < 2:
        pytest.skip("does not apply: such a source names engines of one role")
    async with followed(backend.source()) as heard:
        for role in (Role.PREFILL, Role.DECODE, Role.BOTH, Role.DECODE):
            await backend.name({A: role, B: Role.DECODE})
            await heard.names({A: role, B: Role.DECODE})


async def test_a_failed_reading_is_reported_and_its_engines_stay(backend: Backend) -> None:
    members = of(breakable(backend), A, B)
    await backend.name(members)
    async with followed(backend.source()) as heard:
        await heard.names(members)
        await backend.fail()
        assert await heard.complains()
        words = heard.words
        await heard.until(lambda: heard.words > words + 2)
        assert heard.problem
        assert heard.engines == members
        await backend.mend()
        await heard.names(members)


async def test_what_changed_while_it_was_away_is_named_afterwards(backend: Backend) -> None:
    breakable(backend)
    async with followed(backend.source()) as heard:
        await backend.name(of(backend, A))
        await heard.names(of(backend, A))
        await backend.fail()
        await heard.complains()
        await backend.name(of(backend, A, B))
        await backend.mend()
        await heard.names(of(backend, A, B))


async def test_a_source_that_is_down_at_the_start_is_retried(backend: Backend) -> None:
    await breakable(backend).fail()
    async with followed(backend.source()) as heard:
        await heard.complains()
        assert heard.members is None
        await backend.mend()
        await backend.name(of(backend, A))
        await heard.names(of(backend, A))


async def test_it_can_be_followed_again(backend: Backend) -> None:
    await backend.name(of(backend, A))
    source = backend.source()
    for _ in range(3):
        async with followed(source) as heard:
            await heard.names(of(backend, A))


async def test_it_lets_go_at_any_moment(backend: Backend) -> None:
    for steps in range(6):
        async with followed(backend.source()):
            for _ in range(steps):
                await asyncio.sleep(0)


def test_names_are_no_secrets_and_differ(backend: Backend) -> None:
    source = backend.source()
    assert source.name
    assert "resolver" not in source.name
