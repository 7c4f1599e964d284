"""LMCache's objects as blobs of the store: their manifests and names. Imports no LMCache.

An ObjectKey (lmcache/v1/distributed/api.py) says model, rank, object group, chunk and salt, and not
how the bytes are ordered: shapes and dtypes come from the object's memory, or from what LMCache
will load it into. All but chunk and salt is in the manifest, so that objects which differ in it are
never taken for each other.
"""

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvrouter_store.identity.blob import blob_manifest, blob_name
from kvrouter_store.identity.block import Manifest

DIALECT = "lmcache"


class ObjectKey(Protocol):
    """LMCache's name of an object. Hashable."""

    @property
    def chunk_hash(self) -> bytes:
        """Over the tokens of a chunk and all before it."""

    @property
    def model_name(self) -> str:
        """As the engine has it."""

    @property
    def kv_rank(self) -> int:
        """Which of how many ranks."""

    @property
    def object_group_id(self) -> int:
        """Which of the objects of a chunk."""

    @property
    def cache_salt(self) -> str:
        """What separates users; may be empty."""


class ObjectLayout(NamedTuple):
    """How the bytes of an object are ordered, as far as LMCache says it."""

    text: str
    size_bytes: int


def layout_of(shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> ObjectLayout:
    """The layout of an object of these tensors, of torch's shapes and dtypes."""
    pairs = list(zip(shapes, dtypes, strict=True))
    text = ";".join(f"{dtype}{list(shape)}" for shape, dtype in pairs)
    return ObjectLayout(text, sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs))


def name_of(key: ObjectKey) -> bytes:
    """32 bytes that name the object under its manifest."""
    return blob_name(f"{key.chunk_hash.hex()}@{key.cache_salt}")


class Manifests:
    """The manifests of objects by their keys. Safe in threads.

    Grows with models, ranks and object groups, not with objects.
    """

    def __init__(self, weights_revision: str = "") -> None:
        self._revision = weights_revision
        self._known: dict[tuple[str, int, int], dict[str, Manifest]] = {}
        self._lock = threading.Lock()

    def of(self, key: ObjectKey, layout: ObjectLayout) -> Manifest:
        """The manifest of an object."""
        group = key.model_name, key.kv_rank, key.object_group_id
        with self._lock:
            known = self._known.setdefault(group, {})
            if layout.text not in known:
                known[layout.text] = self._made(group, layout)
            return known[layout.text]

    def all_of(self, key: ObjectKey) -> list[Manifest]:
        """The manifests under which an object of this key may be, as far as known."""
        group = key.model_name, key.kv_rank, key.object_group_id
        with self._lock:
            return list(self._known.get(group, {}).values())

    def learn(self, manifests: Iterable[Manifest]) -> None:
        """Know those of other servers, out of all that a store has."""
        for manifest in manifests:
            fields = dict(manifest.parts[0].layout.fields)
            rank, number, text = map(fields.get, ("kv_rank", "object_group", "layout"))
            if not (isinstance(rank, int) and isinstance(number, int) and isinstance(text, str)):
                continue
            group = manifest.spec.model, rank, number
            if manifest == self._made(group, ObjectLayout(text, manifest.block_bytes)):
                with self._lock:
                    self._known.setdefault(group, {}).setdefault(text, manifest)

    def _made(self, group: tuple[str, int, int], layout: ObjectLayout) -> Manifest:
        model, kv_rank, object_group = group
        of = DIALECT, model, layout.size_bytes
        fields = {"kv_rank": kv_rank, "object_group": object_group}
        texts = {"layout": layout.text, "weights_revision": self._revision}
        return blob_manifest(*of, {**fields, **texts})
