"""What a store holds for its clients: it has to go back to where it was when they are gone."""

from typing import Protocol

from tests.fakes.patience import eventually

HELD = ("reserved_blocks", "fenced_blocks", "leases", "leased_blocks", "waits", "connections")


class HasStats(Protocol):
    """A node, as far as its gauges."""

    def stats(self) -> dict[str, int]: ...


def held(server: HasStats) -> dict[str, int]:
    stats = server.stats()
    return {name: stats[name] for name in HELD}


def assert_gauges_return(server: HasStats, before: dict[str, int]) -> None:
    # Not looked at twice: a connection that its client was killed in may be accepted only now.
    if not eventually(lambda: held(server) == before):
        assert held(server) == before
    stats = server.stats()
    parts = ("free_bytes", "used_bytes", "lent_bytes")
    assert sum(stats[name] for name in parts) == stats["pool_bytes"]
