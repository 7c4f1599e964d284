"""The orders of the connector's scheduler side to the workers for one step. Picklable data."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save blocks `first`.. of a chain, which this step completes, from `block_ids`.

    hashes: the chain from block 0 to the last of these blocks, 32 bytes each.
    """

    request_id: str
    hashes: bytes
    first: int
    block_ids: tuple[int, ...]

    @property
    def span(self) -> range:
        """Which blocks of the chain are meant."""
        return range(self.first, self.first + len(self.block_ids))


@dataclass(frozen=True, slots=True)
class LoadOrder(SaveOrder):
    """Load blocks `first`.. of a chain into `block_ids` before the request is computed.

    last: False where more orders for the request follow (its blocks are still landing).
    lost: with `last`, ids of further blocks of the request that will not come.
    """

    last: bool = True
    lost: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One engine step. `idle`: no tokens are computed in it, the engine only waits for loads.

    replicas, rank_parts: as in EngineIdentity.
    """

    manifest_doc: bytes
    replicas: int = 1
    rank_parts: int = 1
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    idle: bool = False
