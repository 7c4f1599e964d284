"""A value: the bytes of a part behind a header that tells whose they are. Tiers keep values.

The header has the size of the part, the value's name, the block before it in its chain, and a
CRC32C over all that and the bytes. A tier is not trusted: what comes back is looked at before
anyone else sees it.
"""

import struct
from functools import lru_cache
from hashlib import sha256
from typing import Final

from kvrouter_store._core import crc32c
from kvrouter_store.identity.block import Manifest

MAGIC: Final = b"kvrouter"
FORMAT: Final = 1
KEY_PREFIX: Final = f"kvrouter:{FORMAT}:"
REMEMBERED: Final = 4096
"""Blocks whose names are known: each is asked for several times on its way."""
_FIELDS: Final = struct.Struct("<8sIxxxxQ32s32sxxxx")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CRC.size
_NO_PARENT: Final = bytes(32)


class ValueNames:
    """The names of values of one tenant's blocks: 32 bytes for each part of a block.

    A name is a digest over tenant, cache spec, part and block hash: tenants share no value.
    """

    def __init__(self, tenant: str, manifest: Manifest) -> None:
        owner = sha256(tenant.encode()).digest()
        self._parts = [
            sha256(owner + manifest.spec.digest + part.digest) for part in manifest.parts
        ]
        self.of = lru_cache(REMEMBERED)(self._of)

    def _of(self, block_hash: bytes) -> list[bytes]:
        """The name of each part of a block."""
        names = []
        for begun in self._parts:
            digest = begun.copy()
            digest.update(block_hash)
            names.append(digest.digest())
        return names


def key_of(name: bytes) -> str:
    """The key under which a tier keeps the value of this name."""
    return KEY_PREFIX + name.hex()


def seal(value: memoryview, name: bytes, parent: bytes | None) -> None:
    """Write the header in front of the part's bytes, which are in the value already.

    parent: the hash of the block before; None where the block begins a chain.
    """
    size = len(value) - HEADER_BYTES
    _FIELDS.pack_into(value, 0, MAGIC, FORMAT, size, name, parent or _NO_PARENT)
    _CRC.pack_into(value, _FIELDS.size, _crc(value))


def is_intact(value: memoryview, name: bytes) -> bool:
    """Whether this is the whole value of that name, as it was sealed."""
    if len(value) < HEADER_BYTES:
        return False
    *fields, _ = _FIELDS.unpack_from(value)
    (crc,) = _CRC.unpack_from(value, _FIELDS.size)
    return fields == [MAGIC, FORMAT, len(value) - HEADER_BYTES, name] and crc == _crc(value)


def parent_in(value: memoryview) -> bytes | None:
    """The parent that `seal` was given, of an intact value."""
    parent: bytes = _FIELDS.unpack_from(value)[-1]
    return None if parent == _NO_PARENT else parent


def _crc(value: memoryview) -> int:
    return crc32c(value[HEADER_BYTES:], crc32c(value[: _FIELDS.size]))
