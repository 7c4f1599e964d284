"""The KV cache of one request: contiguous tensors, or pages of a pool."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvrouter_store.errors import DeadlineExceeded
from kvrouter_store.tensors.layers import LayerBlocks

from .model import Model
from .settings import EngineSettings


class SequenceCache(Cache):  # type: ignore[misc]
    """What transformers writes KV into and reads it from, for one sequence.

    memory: keys and values of each layer, [tokens, heads, elements]. slots: where in it each token
    of the sequence is; None: in its place. `length` tokens are in it; who computes counts them.
    """

    def __init__(
        self,
        memory: Sequence[tuple[Tensor, Tensor]],
        blocks: Sequence[LayerBlocks],
        indices: Sequence[int],
        slots: Tensor | None,
    ) -> None:
        super().__init__(layers=[_Layer(self, keys, values) for keys, values in memory])
        self.blocks = blocks
        self.indices = indices
        self.length = 0
        self._slots = slots

    def rows(self, start: int, stop: int) -> slice | Tensor:
        """Where tokens of the sequence are in the memory."""
        return slice(start, stop) if self._slots is None else self._slots[start:stop]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a sequence; keeps all tokens also where attention has a window."""

    is_sliding = False

    def __init__(self, sequence: SequenceCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._sequence = sequence
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start = self._sequence.length
        stop = start + key_states.shape[-2]
        new, every = self._sequence.rows(start, stop), self._sequence.rows(0, stop)
        self.keys[new] = key_states[0].transpose(0, 1)
        self.values[new] = value_states[0].transpose(0, 1)
        return tuple(each[every].transpose(0, 1)[None] for each in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._sequence.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._sequence.length

    def get_max_length(self) -> int:
        return -1


class CacheMemory:
    """Where sequences have their KV. A pool of pages has room for one sequence of full length."""

    def __init__(self, settings: EngineSettings, model: Model) -> None:
        self._settings = settings
        self._model = model
        self._paged = settings.cache == "paged"
        self._pool = self._tensors(settings.max_model_len) if self._paged else []
        self._free = list(range(settings.max_model_len // settings.block_tokens))
        random.Random(0).shuffle(self._free)

    @contextmanager
    def sequence(self, tokens: int) -> Iterator[SequenceCache]:
        """A cache with room for so many tokens, at most --max-model-len."""
        block_tokens = self._settings.block_tokens
        blocks = -(-tokens // block_tokens)
        if not self._paged:
            yield self._over(self._tensors(blocks * block_tokens), range(blocks), None)
            return
        taken = [self._free.pop() for _ in range(blocks)]
        pages = torch.tensor(taken, device=self._model.network.device)
        slots = pages[:, None] * block_tokens + torch.arange(block_tokens, device=pages.device)
        unread = True
        try:
            yield self._over(self._pool, taken, slots.flatten())
        except DeadlineExceeded:  # of a put: the store's client may still read the pages
            unread = False
            raise
        finally:
            self._free += taken if unread else []

    def layers(self) -> Sequence[LayerBlocks]:
        """Layers as those of every sequence, of one block."""
        return self._over(self._tensors(self._settings.block_tokens), range(1), None).blocks

    def _over(
        self,
        memory: list[tuple[Tensor, Tensor]],
        indices: Sequence[int],
        slots: Tensor | None,
    ) -> SequenceCache:
        block_tokens = self._settings.block_tokens
        blocks = [LayerBlocks.contiguous(*pair, block_tokens=block_tokens) for pair in memory]
        return SequenceCache(memory, blocks, indices, slots)

    def _tensors(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        network = self._model.network
        return [
            (
                torch.empty(tokens, *shape, dtype=network.dtype, device=network.device),
                torch.empty(tokens, *shape, dtype=network.dtype, device=network.device),
            )
            for shape in self._model.kv_shapes
        ]
