"""SGLang's page keys as names of the store's blocks."""

import re
from collections.abc import Iterable

from kvrouter_store.identity.blob import blob_name

PAGE_HASH = re.compile("[0-9a-f]{64}")


def name_of(key: str) -> bytes:
    """32 bytes: a page's key is a SHA-256 in hex, chained over its tokens and those before it."""
    return bytes.fromhex(key) if PAGE_HASH.fullmatch(key) else blob_name(key)


def names_of(keys: Iterable[str]) -> bytes:
    """The names of pages, one after another."""
    return b"".join(map(name_of, keys))
