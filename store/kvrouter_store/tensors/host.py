"""Tensors in host memory: the store's client reads and writes them in place."""

from collections.abc import Sequence

from kvrouter_store.tensors.layers import LayerBlocks


class _InPlace:
    """Blocks of a layer where they are; there is nothing to copy."""

    def __init__(self, layer: LayerBlocks, indices: Sequence[int]) -> None:
        self.memory = layer.in_host_memory
        self.indices = indices

    def fetch(self) -> None:
        """Nothing to do: a CPU tensor holds what was computed."""

    def wait(self, deadline_s: float) -> None:
        """Nothing to wait for."""

    def deliver(self, blocks: int, deadline_s: float) -> None:
        """Nothing to do: the client has written into the tensors."""

    def release(self) -> None:
        """Nothing to give back."""


class HostCopier:
    """A `Copier` for CPU tensors. Owns nothing."""

    def most_blocks(self, layer: LayerBlocks) -> int:
        """As many as the layer has."""
        return max(1, int(layer.tensors[0].shape[0]))

    def stage(self, layer: LayerBlocks, indices: Sequence[int], deadline_s: float) -> _InPlace:
        """The blocks in place. ValueError where the tensors are on a device."""
        return _InPlace(layer, indices)

    def close(self) -> None:
        """Nothing to free."""
