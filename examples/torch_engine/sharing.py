"""The engine's KV in the store: what is loaded, what is put, and what the router is told."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.identity.block import CacheSpec
from kvrouter_store.identity.chain import BlockHashes, hash_tokens, root_hash
from kvrouter_store.tensors.base import Copier, NoRoom
from kvrouter_store.tensors.client import Blocks, LayerwisePut, TensorClient
from kvrouter_store.tensors.host import HostCopier
from kvrouter_store.tensors.layers import LayerBlocks, layered_manifest

from .kv_cache import SequenceCache
from .settings import EngineSettings

log = logging.getLogger("kvrouter_store.torch_engine")
LAYOUT = "transformers/1"


class Sharing:
    """The link of one engine. Owns connections and threads: close() ends them.

    An absent store never fails a request: then nothing is loaded, and nothing stored.
    """

    def __init__(
        self, settings: EngineSettings, layers: Sequence[LayerBlocks], model: str, revision: str
    ) -> None:
        spec = CacheSpec(
            model=model,
            weights_revision=revision,
            kv_dtype=settings.dtype,
            block_tokens=settings.block_tokens,
            hash_algo="sha256_cbor",
            root=root_hash(None).hex(),
        )
        self.manifest = layered_manifest(spec, layers, LAYOUT)
        self.chunk_blocks = settings.chunk_tokens // settings.block_tokens
        self._saves = settings.saves
        name = settings.engine_name
        client = StoreClient(settings.store, name=name, token=settings.store_token)
        self._link = StoreLink(client, self.manifest, log, engine=name)
        self._tensors = TensorClient(self._link, _copier(settings.device))
        self._link.start()

    def prompt(self, tokens: Sequence[int], salt: str | None) -> "SharedPrompt":
        """The names of a prompt's blocks."""
        spec = self.manifest.spec
        root = bytes.fromhex(spec.root)
        names = hash_tokens(list(tokens), spec.block_tokens, root=root, cache_salt=salt or None)
        whole = len(names) // self.chunk_blocks * self.chunk_blocks
        return SharedPrompt(self, names[:whole], (len(tokens) - 1) // spec.block_tokens)

    def load(self, names: BlockHashes, cache: SequenceCache) -> int:
        """Load the longest prefix that the store has, in whole chunks; how many blocks."""
        blocks = self._link.match(names.data)
        blocks -= blocks % self.chunk_blocks
        wanted = Blocks(cache.blocks, cache.indices[:blocks], names.data, range(blocks))
        try:
            loaded = self._tensors.get_tensors_into(wanted)
        except NoRoom:
            return 0
        return loaded - loaded % self.chunk_blocks

    def begin(self, names: BlockHashes, cache: SequenceCache, span: range) -> LayerwisePut | None:
        """Begin to put these blocks; None where this engine saves nothing."""
        if not self._saves or not span or self._link.away:
            return None
        places = cache.indices[span.start : span.stop]
        return self._tensors.put_tensors(Blocks(cache.blocks, places, names.data, span))

    def report(self, blocks: int) -> dict[str, Any]:
        """What the router is told of a prompt: the store has its first `blocks` blocks."""
        spec = self.manifest.spec
        about = {"manifest": self.manifest.digest.hex(), "blocks": blocks}
        return {"kvstore": about | {"block_tokens": spec.block_tokens, "root": spec.root}}

    def close(self) -> None:
        """End threads and connections."""
        self._tensors.close()
        self._link.close()


@dataclass
class SharedPrompt:
    """One prompt's blocks: whole chunks of it. `most`: how many may be loaded at most.

    One token is always left to compute: its logits begin the answer.
    """

    sharing: Sharing
    names: BlockHashes
    most: int
    loaded: int = 0
    puts: list[LayerwisePut] = field(default_factory=list)
    open: ExitStack = field(default_factory=ExitStack)
    """Within it chunks are put; at its end no put reads the cache any more."""

    def load(self, cache: SequenceCache) -> int:
        """Load what the store has; how many tokens."""
        self.loaded = self.sharing.load(self.names[: self.most], cache)
        return self.loaded * self.sharing.manifest.spec.block_tokens

    def begin(self, cache: SequenceCache, first_token: int, tokens: int) -> LayerwisePut | None:
        """Begin to put a chunk that is computed next; None where it is not shared."""
        block_tokens = self.sharing.manifest.spec.block_tokens
        first = first_token // block_tokens
        span = range(first, first + tokens // block_tokens)
        if span.stop > len(self.names) or tokens % block_tokens:
            return None
        put = self.sharing.begin(self.names, cache, span)
        if put is not None:
            self.puts.append(self.open.enter_context(put))
        return put

    def stored(self) -> int:
        """Leading blocks of the prompt that the store has when all puts have ended."""
        blocks = self.loaded
        for put in self.puts:
            if put.blocks.span.start == blocks:
                blocks += put.finish()
        return blocks


def _copier(device: str) -> Copier:
    if device == "cpu":
        return HostCopier()
    from kvrouter_store.tensors.cuda import cuda_copier  # noqa: PLC0415 (CUDA alone)

    return cuda_copier(device)
