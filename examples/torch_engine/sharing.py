"""The engine's KV in the store: what is loaded, what is put, and what the router is told."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
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


class Sharing:
    """The link of one engine. Owns connections and threads: close() ends them.

    An absent store never fails a request: then nothing is loaded, and nothing stored.
    """

    def __init__(
        self, settings: EngineSettings, layers: Sequence[LayerBlocks], model: str, revision: str
    ) -> None:
        root = root_hash(None).hex()
        sizes = settings.block_tokens, "sha256_cbor", root
        self.spec = CacheSpec(model, revision, settings.dtype, *sizes)
        # KV that was computed in other steps is rounded otherwise.
        layout = f"transformers/1, {settings.chunk_tokens} tokens at once"
        self.manifest = layered_manifest(self.spec, layers, layout)
        self.chunk_blocks = settings.chunk_tokens // settings.block_tokens
        self.saves = settings.saves
        name = settings.engine_name
        token, deadline_s = settings.store_token, settings.deadline_s
        client = StoreClient(settings.store, name=name, token=token, deadline_s=deadline_s)
        self.link = StoreLink(client, self.manifest, log, engine=name)
        self.tensors = TensorClient(self.link, _copier(settings.device))
        self.link.start()

    def names(self, tokens: Sequence[int], salt: str | None) -> BlockHashes:
        """The names of a prompt's blocks, as far as they are whole chunks."""
        root = bytes.fromhex(self.spec.root)
        size = self.spec.block_tokens
        names = hash_tokens(list(tokens), size, root=root, cache_salt=salt or None)
        return names[: len(names) // self.chunk_blocks * self.chunk_blocks]

    def report(self, blocks: int) -> dict[str, Any]:
        """What the router is told of a prompt: the store has its first `blocks` blocks."""
        about = {"manifest": self.manifest.digest.hex(), "blocks": blocks}
        return {"kvstore": about | {"block_tokens": self.spec.block_tokens, "root": self.spec.root}}

    def close(self) -> None:
        """End threads and connections."""
        self.tensors.close()
        self.link.close()


class SharedPrompt(ExitStack):
    """The whole chunks of one prompt. At the end of this context no put reads the cache any more.

    names: as `Sharing.names` has them.
    """

    def __init__(self, sharing: Sharing, names: BlockHashes, cache: SequenceCache) -> None:
        super().__init__()
        self._sharing, self._names, self._cache = sharing, names, cache
        self._puts: list[LayerwisePut] = []
        self._loaded = 0

    def load(self, most_tokens: int) -> int:
        """Load the longest prefix that the store has, in whole chunks; how many tokens."""
        block_tokens, chunk = self._sharing.spec.block_tokens, self._sharing.chunk_blocks
        blocks = self._sharing.link.match(self._names[: most_tokens // block_tokens].data)
        try:
            wanted = self._blocks(range(blocks // chunk * chunk))
            loaded = self._sharing.tensors.get_tensors_into(wanted)
        except NoRoom:
            return 0
        self._loaded = loaded // chunk * chunk
        return self._loaded * block_tokens

    def begin(self, first_token: int, tokens: int) -> LayerwisePut | None:
        """Begin to put a chunk that is computed next; None where it is not shared."""
        block_tokens = self._sharing.spec.block_tokens
        span = range(first_token // block_tokens, (first_token + tokens) // block_tokens)
        part = tokens % block_tokens or span.stop > len(self._names)
        if part or not self._sharing.saves or self._sharing.link.away:
            return None
        put = self._sharing.tensors.put_tensors(self._blocks(span))
        self._puts.append(self.enter_context(put))
        return put

    def stored(self) -> int:
        """Leading blocks of the prompt that the store has, when all puts have ended."""
        blocks = self._loaded
        for put in self._puts:
            if put.blocks.span.start == blocks:
                blocks += put.finish()
        return blocks

    def _blocks(self, span: range) -> Blocks:
        places = self._cache.indices[span.start : span.stop]
        return Blocks(self._cache.blocks, places, self._names.data, span)


def _copier(device: str) -> Copier:
    if device == "cpu":
        return HostCopier()
    from kvrouter_store.tensors.cuda import cuda_copier  # noqa: PLC0415 (CUDA alone)

    return cuda_copier(device)
