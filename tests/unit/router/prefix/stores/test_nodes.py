import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.prefix.stores.test_node import (
    HASHES,
    MANIFEST,
    NAME,
    RENEWED,
    FakeLease,
    FakeStore,
    FakeWaited,
)

from kvrouter.engines.engine import CacheGroup, Identity
from kvrouter.engines.families.base import Handoff
from kvrouter.prefix.stores.base import LandingOutcome, StoreMatch, WantedBlocks
from kvrouter.prefix.stores.node import MAX_LEFT, NodesView
from kvrouter_store.client.results import Match
from kvrouter_store.identity.block import Manifest

A, B, C = "kv://a:1", "kv://b:1", "kv://c:1"


@dataclass(eq=False)
class FakeNode(FakeStore):
    """A node of a store, and a client of it; `waited` notes the hashes of each wait."""

    url: str = ""
    connected: bool = True
    on_change: Callable[[str], None] = lambda why: None
    started: bool = False
    closed: bool = False
    waited: list[int] = field(default_factory=list)
    waited_for: list[Manifest] = field(default_factory=list)
    leases: list[FakeLease] = field(default_factory=list)
    together: asyncio.Barrier | None = None  # where matches of several nodes meet

    def start(self) -> None:
        self.started = True

    async def wait_connected(self, deadline_s: float) -> bool:
        return self.connected

    async def close(self) -> None:
        self.closed = True

    async def match(self, manifest: Manifest, hashes: bytes, *, promote: bool = False) -> Match:
        if self.together is not None:
            await self.together.wait()
        return await super().match(manifest, hashes, promote=promote)

    async def wait(
        self, manifest: Manifest, hashes: bytes, upto: int, deadline_s: float, lease: bool = False
    ) -> FakeWaited:
        self.waited.append(len(hashes) // 32)
        self.waited_for.append(manifest)
        if self.together is not None:
            await self.together.wait()
        found = await super().wait(manifest, hashes, upto, deadline_s, lease)
        if found.lease is not None:
            self.leases.append(found.lease)
        return found


Make = Callable[..., tuple[NodesView, list[FakeNode]]]


def but_b(url: str) -> FakeNode:
    if url == B:
        raise ValueError("it is plain")
    return FakeNode(1, url=url)


@pytest.fixture
def make() -> Make:
    """A view of nodes that hold so many blocks, at A, B and C."""

    def made(*blocks: int) -> tuple[NodesView, list[FakeNode]]:
        nodes = {u: FakeNode(n, url=u) for u, n in zip((A, B, C), blocks, strict=False)}
        view = NodesView(lambda url: nodes[url])  # type: ignore[arg-type, return-value]
        view.follow(nodes)
        return view, list(nodes.values())

    return made


async def test_one_node_is_asked_without_a_word_of_nodes(make: Make) -> None:
    view, (node,) = make(3)
    assert await view.match(NAME, HASHES) == StoreMatch(3)
    landing = await view.wait(WantedBlocks(NAME, HASHES, 3, node="kv://elsewhere:1"), 1.0)
    assert (landing.outcome, landing.node) == (LandingOutcome.LANDED, None)
    assert list(view.nodes) == []
    assert node.asked == ["manifests", "match", "wait"]


async def test_all_nodes_are_asked_at_once(make: Make) -> None:
    view, nodes = make(2, 4, 1)
    barrier = asyncio.Barrier(3)
    for node in nodes:
        node.together = barrier
    async with asyncio.timeout(5):
        found = await view.match(NAME, HASHES)
    assert (found.blocks, found.nodes) == (4, {A: 2, B: 4, C: 1})
    assert found.source(A) == found.source(None) == B
    assert found.source(B) is None


class FakeIndex:
    """What is known of nodes, by URL."""

    def __init__(self, **known: int) -> None:
        self.known = {f"kv://{host}:1": blocks for host, blocks in known.items()}
        self.followed: list[list[str]] = []
        self.groups: list[Sequence[CacheGroup]] = []
        self.closed = False

    def follow(self, urls: Collection[str]) -> None:
        self.followed.append(list(urls))

    def match(self, groups: Sequence[CacheGroup], hashes: bytes) -> dict[str, int]:
        self.groups.append(groups)
        return self.known

    def close(self) -> None:
        self.closed = True


async def test_of_nodes_that_are_known_only_the_best_is_asked(make: Make) -> None:
    view, nodes = make(1, 3, 1)
    view.index = index = FakeIndex(a=1, b=4)  # type: ignore[assignment]
    found = await view.match(NAME, HASHES)
    assert (found.blocks, found.nodes) == (3, {A: 1, B: 3, C: 1})  # B has lost a block since
    assert ["match" in node.asked for node in nodes] == [False, True, True]
    assert index.groups == [(CacheGroup(NAME),)]


async def test_a_node_that_is_known_and_not_connected_holds_nothing(make: Make) -> None:
    view, nodes = make(1, 4)
    view.index = FakeIndex(a=1, b=4)  # type: ignore[assignment]
    nodes[1].away, nodes[1].connected = True, False
    assert await view.match(NAME, HASHES) == StoreMatch(1, {A: 1, B: 0})


async def test_the_best_of_known_nodes_is_another_one_each_time(make: Make) -> None:
    view, nodes = make(4, 4, 4)
    view.index = FakeIndex(a=4, b=4, c=4)  # type: ignore[assignment]
    for _ in range(6):
        await view.match(NAME, HASHES)
    assert [node.asked.count("match") for node in nodes] == [2, 2, 2]


async def test_an_index_follows_the_nodes_and_closes_with_their_view(make: Make) -> None:
    view, _ = make(1, 1)
    view.index = index = FakeIndex()  # type: ignore[assignment]
    view.follow([A])
    view.follow([])
    assert index.followed == [[A], []]
    assert await view.match(NAME, HASHES) == StoreMatch(0, {})
    assert (
        await view.wait(WantedBlocks(NAME, HASHES, 1), 1.0)
    ).outcome is LandingOutcome.STORE_AWAY
    await view.close()
    assert index.closed


async def test_nodes_that_hold_as_much_take_turns_as_the_source(make: Make) -> None:
    view, _ = make(4, 4, 1)
    sources = [(await view.match(NAME, HASHES)).source(C) for _ in range(3)]
    assert set(sources) == {A, B}


async def test_a_node_that_is_away_costs_its_own_blocks_alone(make: Make) -> None:
    view, nodes = make(2, 4)
    nodes[1].away = True
    nodes[1].connected = False
    assert await view.match(NAME, HASHES) == StoreMatch(2, {A: 2, B: 0})
    assert view.counts == {"match_failed": 1}
    assert view.away == [B]


async def test_a_manifest_that_one_node_knows_is_asked_for_at_no_other(make: Make) -> None:
    view, nodes = make(2, 4)
    nodes[1].registered.clear()
    await view.joins(Identity(("m",), manifest=NAME))
    for node in nodes:
        node.asked.clear()
    assert (await view.match(NAME, HASHES)).nodes == {A: 2, B: 4}
    assert [node.asked for node in nodes] == [["match"], ["match"]]


async def test_engines_that_rename_their_blocks_do_so_at_every_node(make: Make) -> None:
    view, nodes = make(1, 1)
    for node in nodes:
        node.registered.append(RENEWED)
    joined, said = Identity(("m",), manifest=NAME), RENEWED.digest.hex()
    assert view.promised(Handoff(manifest=said, blocks=2), joined) == (said, 2)
    await view.match(NAME, HASHES)
    assert [node.matched for node in nodes] == [[RENEWED], [RENEWED]]
    found = view.manifests.difference(NAME, RENEWED.digest.hex())
    assert found == "spec.weights_revision: r1 and r2"


async def test_an_engine_that_restarted_names_its_blocks_as_when_it_joined_again(
    make: Make,
) -> None:
    view, nodes = make(1, 1)
    for node in nodes:
        node.registered.append(RENEWED)
    joined = Identity(("m",), manifest=NAME)
    for said in (RENEWED.digest.hex(), NAME):
        assert view.promised(Handoff(manifest=said, blocks=1), joined) == (said, 1)
        assert view.current(NAME) == said
    await view.match(NAME, HASHES)
    assert [node.matched for node in nodes] == [[MANIFEST], [MANIFEST]]


async def test_a_landing_is_awaited_by_the_name_that_the_hand_off_says(make: Make) -> None:
    view, (a, _) = make(1, 1)
    a.registered.append(RENEWED)
    renewed = Handoff(manifest=RENEWED.digest.hex())
    view.promised(renewed, Identity(("m",), manifest=NAME))  # another engine: this one has not yet
    assert (
        await view.wait(WantedBlocks(NAME, HASHES, 1, node=A), 1.0)
    ).outcome is LandingOutcome.LANDED
    assert a.waited_for == [MANIFEST]


async def test_a_landing_is_awaited_where_its_engine_writes(make: Make) -> None:
    view, nodes = make(4, 4)
    held = StoreMatch(3, {A: 1, B: 3})
    landing = await view.wait(WantedBlocks(NAME, HASHES, 4, held=held, node=B), 1.0)
    assert (landing.outcome, landing.blocks, landing.node) == (LandingOutcome.LANDED, 4, B)
    assert [node.waited for node in nodes] == [[], [2]]  # the last one that it held stands for all
    assert landing.lease is not None
    landing.lease.release()
    assert [lease.held for lease in nodes[1].leases] == [False]


@pytest.mark.parametrize("node", [None, "kv://elsewhere:1"])
async def test_where_nobody_knows_the_node_the_first_landing_counts(
    make: Make, node: str | None
) -> None:
    view, nodes = make(0, 4)
    nodes[0].slow = True
    landing = await view.wait(WantedBlocks(NAME, HASHES, 4, node=node), 1.0)
    assert (landing.outcome, landing.node) == (LandingOutcome.LANDED, B)
    assert nodes[1].leases[0].held


async def test_of_two_landings_one_lease_is_kept(make: Make) -> None:
    view, nodes = make(4, 4)
    barrier = asyncio.Barrier(2)
    for node in nodes:
        node.together = barrier
    landing = await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)
    await asyncio.sleep(0)
    assert landing.lease is not None
    kept = [lease for node in nodes for lease in node.leases if lease.held]
    assert list(map(id, kept)) == list(map(id, landing.lease.held))


async def test_without_a_landing_the_wait_that_came_farthest_counts(make: Make) -> None:
    view, nodes = make(1, 3, 2)
    nodes[2].away = True
    landing = await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)
    assert (landing.outcome, landing.blocks, landing.node) == (LandingOutcome.TIMEOUT, 3, B)
    for node in nodes:
        node.away = True
    assert (
        await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)
    ).outcome is LandingOutcome.STORE_AWAY


async def test_a_cancelled_wait_ends_at_every_node(make: Make) -> None:
    view, nodes = make(0, 4)
    await view.joins(Identity(("m",), manifest=NAME))
    for node in nodes:
        node.slow = True
    wait = asyncio.create_task(view.wait(WantedBlocks(NAME, HASHES, 4), 1.0))
    while not all(node.waited for node in nodes):
        await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    await asyncio.sleep(0)
    assert [t for t in asyncio.all_tasks() if t.get_name() == "landing"] == []


async def test_nodes_come_and_go_and_those_that_stay_keep_their_connections(make: Make) -> None:
    view, nodes = make(1, 2, 3)
    view.follow([A, B])
    await view.start(1.0)
    first, second, third = nodes
    assert (first.started, second.started, third.closed) == (True, True, True)
    third.closed = False
    view.follow([B, C])
    assert third.started
    assert (await view.match(NAME, HASHES)).nodes == {B: 2, C: 3}
    await view.close()
    assert [node.closed for node in nodes] == [True] * 3


@given(st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 9), min_size=1))
def test_a_source_has_more_than_the_own_node_and_as_much_as_any(held: dict[str, int]) -> None:
    found = StoreMatch(max(held.values()), held)
    for own in (None, A, B, C):
        source = found.source(own)
        if source is None:
            assert held.get(own or "", 0) == found.blocks
        else:
            assert held[source] == found.blocks > held.get(own or "", 0)


def test_what_landed_is_known_beside_what_was_held() -> None:
    found = StoreMatch(3, {A: 1, B: 3}).with_landed(A, 4)
    assert (found.blocks, found.source(B), found.source(A)) == (4, A, None)
    assert StoreMatch(3).with_landed(None, 4) == StoreMatch(3)


async def test_a_node_whose_url_cannot_be_used_costs_only_itself() -> None:
    view = NodesView(but_b)  # type: ignore[arg-type]
    view.follow([A, B, C])
    assert [each.url for each in view.clients] == [A, C]


async def test_outcomes_of_a_node_that_left_still_count(make: Make) -> None:
    view, _ = make(1, 1)
    counted = view.counts
    await view.wait(WantedBlocks(NAME, HASHES, 1, node=A), 1.0)
    view.follow([B])
    assert counted == view.counts == {"landed": 1}


async def test_the_last_of_several_nodes_is_still_named(make: Make) -> None:
    view, _ = make(2, 4)
    view.follow([B])
    found = await view.match(NAME, HASHES)
    assert (found.nodes, found.source(A)) == ({B: 4}, B)
    assert (await view.wait(WantedBlocks(NAME, HASHES, 4, node=B), 1.0)).node == B
    assert list(view.nodes) == [B]


async def test_at_a_node_that_left_nothing_is_awaited_and_it_is_out_of_reach(make: Make) -> None:
    view, (a, *_) = make(2, 4, 1)
    view.follow([B])
    a.asked.clear()
    assert (
        await view.wait(WantedBlocks(NAME, HASHES, 1, node=A), 9.0)
    ).outcome is LandingOutcome.STORE_AWAY
    assert (a.asked, view.away, view.out_of_reach) == ([], [], {A, C})
    view.follow([A, B])
    assert view.out_of_reach == {C}
    assert (
        await view.wait(WantedBlocks(NAME, HASHES, 1, node=A), 1.0)
    ).outcome is LandingOutcome.LANDED


async def test_only_the_latest_nodes_that_left_are_remembered(make: Make) -> None:
    view, _ = make(1, 1)
    view.open_client = lambda url: FakeNode(1, url=url)  # type: ignore[assignment, return-value]
    view.follow(many := [f"kv://n{number}:1" for number in range(MAX_LEFT + 1)])
    view.follow([])
    assert view.out_of_reach == set(many[1:])


async def test_one_node_alone_is_never_out_of_reach(make: Make) -> None:
    view, (node,) = make(1)
    node.connected = False
    assert (view.away, list(view.out_of_reach)) == ([A], [])


async def test_the_log_says_when_a_node_joins_is_away_returns_and_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvrouter.prefix.stores.node")
    client = FakeNode(1, url=A)
    view = NodesView(lambda url: client)  # type: ignore[arg-type, return-value]
    view.follow([A])
    for why in ("", "Connection refused", "Connection refused", "", ""):
        client.on_change(why)
    view.follow([])
    await view.close()
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", f"store node {A} joins"),
        ("WARNING", f"store node {A} is away: Connection refused"),
        ("INFO", f"store node {A} answers again"),
        ("INFO", f"store node {A} leaves"),
    ]
