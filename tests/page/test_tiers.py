"""The store's tiers, as a node tells them."""

from tests.page.test_window import Clock

from kvrouter.control.page.model import TierCard
from kvrouter.control.page.tiers import StoreWatch, StoreWatches
from kvrouter_store.errors import StoreUnavailable

MEMORY = {
    "pool_bytes": 1000, "used_bytes": 300, "lent_bytes": 100, "blocks": 7, "draining": 0,
    "leases": 2, "connections.shm": 3, "connections.tcp": 0,
}  # fmt: skip
DISK = {"disk_bytes": 5000, "disk_used_bytes": 600, "disk_blocks": 9, "disk_bypassed.slow": 0}


class FakeClient:
    """A store that says what a test says."""

    url = "kv://127.0.0.1:7400"
    connected = True

    def __init__(self) -> None:
        self.told: dict[str, int] | None = dict(MEMORY)

    async def stats(self) -> dict[str, int]:
        if self.told is None:
            raise StoreUnavailable("there is no connection")
        return self.told


async def test_each_node_there_is_has_a_card_and_keeps_it_while_others_come_and_go() -> None:
    clients = [FakeClient(), FakeClient()]
    clients[1].url = "kv://127.0.0.2:7400"
    watches = StoreWatches(lambda: clients)
    await watches.poll()
    assert [(card.url, len(card.tiers)) for card in watches.cards()] == [
        ("kv://127.0.0.1:7400", 1), ("kv://127.0.0.2:7400", 1)
    ]  # fmt: skip
    del clients[0]
    assert [(card.url, len(card.tiers)) for card in watches.cards()] == [
        ("kv://127.0.0.2:7400", 1)
    ]  # fmt: skip


async def test_before_it_has_said_anything_there_are_no_tiers() -> None:
    card = StoreWatch(FakeClient(), Clock()).card()
    assert (card.tiers, card.age_s, card.problem) == ([], None, None)


async def test_a_card_tells_what_the_node_said_and_how_old_that_is() -> None:
    clock = Clock()
    watch = StoreWatch(FakeClient(), clock)
    await watch.poll()
    clock.now_s = 1.5
    card = watch.card()
    assert card.tiers == [TierCard("memory", 1000, 400, 7, None)]
    assert (card.age_s, card.leases) == (1.5, 2)
    assert card.connections == {"shm": 3, "tcp": 0}


async def test_a_disk_that_is_bypassed_says_why() -> None:
    client = FakeClient()
    client.told = {**MEMORY, **DISK, "disk_bypassed.slow": 1}
    watch = StoreWatch(client, Clock())
    await watch.poll()
    assert [tier.name for tier in watch.card().tiers] == ["memory", "disk"]
    assert watch.card().tiers[1].note == "not used for now: slow"


async def test_tiers_below_a_node_are_one_row_with_the_names_of_those_away() -> None:
    client = FakeClient()
    watch = StoreWatch(client, Clock())
    client.told = {**MEMORY, "tier_up.redis://a:1": 1, "tier_up.mooncake://m": 0}
    await watch.poll()
    assert watch.card().tiers[1] == TierCard("remote", 0, 0, 0, "away: mooncake://m")
    client.told = {**client.told, "tier_up.mooncake://m": 1}
    await watch.poll()
    assert watch.card().tiers[1].note is None


async def test_a_store_that_is_away_keeps_what_it_said_last_and_says_what_is_wrong() -> None:
    client = FakeClient()
    watch = StoreWatch(client, Clock())
    await watch.poll()
    client.told = None
    await watch.poll()
    card = watch.card()
    assert card.problem == "there is no connection"
    assert len(card.tiers) == 1
