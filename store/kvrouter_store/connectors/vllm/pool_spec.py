"""What the scheduler tells the ranks to load from the memory of a store on their host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from kvrouter_store.connectors.vllm.leases import Place, Run


class PoolSpec(BlockIDsLoadStoreSpec):  # type: ignore[misc]
    """What ranks load from the pool. Its block_ids, once a rank has set them, are rows of the pool.

    epoch: the life of the node in which this is so. offsets, crcs: of the blocks of all `runs`.
    """

    def __init__(
        self, request_id: str, epoch: int, runs: Sequence[Run], places: Sequence[Place]
    ) -> None:
        super().__init__([])
        self.request_id, self.epoch, self.runs = request_id, epoch, runs
        self.offsets = [offset for offset, _ in places]
        self.crcs = [crc for _, crc in places]

    def begin(self, granule_bytes: int) -> None:
        """A row of the pool begins at every granule."""
        self.block_ids = (np.array(self.offsets, dtype=np.int64) // granule_bytes).astype(np.int32)

    @property
    def chunk_ids(self) -> Any:
        """The block_ids, by the name that vLLM's host memory has for them."""
        return self.block_ids
