"""The seam between the tensors of a device and the store's client, which reads host memory."""

from collections.abc import Sequence
from typing import Protocol

from kvrouter_store.errors import KVStoreError
from kvrouter_store.tensors.layers import HostBlocks, LayerBlocks


class CopyFailed(KVStoreError):
    """A copy between device and host failed, or did not end in time. Nothing is copied any more."""


class NoRoom(KVStoreError):
    """No host memory became free in time: the store takes blocks slower than they are computed."""


class Staging(Protocol):
    """Host memory for some blocks of one layer. Its owner releases it, once.

    Block k of them is the block of `memory` at `indices[k]`.
    """

    memory: HostBlocks
    indices: Sequence[int]

    def fetch(self) -> None:
        """Begin to copy the blocks out of the tensors, after all that the caller has queued there.

        Raises CopyFailed.
        """

    def wait(self, deadline_s: float) -> None:
        """Return when the memory holds the blocks. Raises CopyFailed, also after the deadline."""

    def deliver(self, blocks: int, deadline_s: float) -> None:
        """Copy the first `blocks` blocks into the tensors, and return when they are there.

        Raises CopyFailed, also after the deadline.
        """

    def release(self) -> None:
        """Give the memory back. Nothing may read or write it any more."""


class Copier(Protocol):
    """Brings blocks of layers to and from host memory. Used by two threads; close() ends it."""

    def most_blocks(self, layer: LayerBlocks) -> int:
        """How many blocks of the layer one staging may have. ValueError where that is none."""

    def stage(self, layer: LayerBlocks, indices: Sequence[int], deadline_s: float) -> Staging:
        """Host memory for the blocks at `indices`; waits for room.

        Raises NoRoom after the deadline, CopyFailed once a copy has failed.
        """

    def close(self) -> None:
        """Free what the copier owns; all stagings have been released."""
