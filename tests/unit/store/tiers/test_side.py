"""The tier side of a node: what it reads is not asked of it, and its end leaves nobody waiting."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import chain_of, put_chain
from tests.unit.store.tiers.test_blocks import CHAIN, HASHES, MANIFEST, VALUES
from tests.unit.store.tiers.test_fetch import DictTier

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.tiers import serving_tiers
from kvrouter_store.tiers.base import TierAway

LONG_S = 30.0


class TierThatEndsTheSide(DictTier):
    """It stops in a way that no tier should."""

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        raise TierAway("reset")

    async def stop(self) -> None:
        raise RuntimeError("not foreseen")


class SlowTier(DictTier):
    """While it is asked for the first time, something happens."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__("slow")
        self.questions: list[str] = []
        self._meanwhile = meanwhile

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        if not self.questions:
            await asyncio.to_thread(self._meanwhile)
        self.questions += keys
        return await super().holds(keys)


@contextmanager
def below(server: StoreServer, url: str, tier: DictTier) -> Iterator[None]:
    settings = StoreSettings().model_copy(update={"tier_timeout": LONG_S})
    with serving_tiers(server, settings, [tier], url, ClientTls()):
        assert eventually(lambda: up(server, tier))
        yield


def up(server: StoreServer, tier: DictTier) -> bool:
    return server.stats()[f"tier_up.{tier.name}"] == 1


def test_an_error_that_ends_the_tier_side_leaves_no_request_waiting(
    server: StoreServer, url: str, client: StoreClient
) -> None:
    tier = TierThatEndsTheSide("broken")
    with below(server, url, tier):
        assert client.match(MANIFEST, CHAIN).blocks == 0
        assert eventually(lambda: not server.stats()["tiered"])
        assert client.match(MANIFEST, CHAIN).blocks == 0  # long before the tier's deadline
        assert not up(server, tier)


@pytest.mark.slow
def test_what_the_tier_side_cannot_read_from_the_node_is_not_asked_of_the_tiers(
    server: StoreServer, url: str, client: StoreClient
) -> None:
    tier = SlowTier(meanwhile=client.purge)
    with below(server, url, tier):
        for chain in (CHAIN, chain_of(1, "later")):
            for part in range(2):
                put_chain(client, MANIFEST, chain, part)
            assert eventually(lambda: bool(tier.questions))
        later = VALUES.keys([chain_of(1, "later")])
        assert eventually(lambda: tier.values.keys() >= set(later))
    asked = Counter(tier.questions)
    assert asked.keys() == {*VALUES.keys(HASHES), *later}
    assert max(asked.values()) <= 2  # a block may be told again with its second part
