"""Pages of one rank in the store. Nothing raises: without the store no page is there."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.batches import questions
from kvrouter_store.client.results import THERE
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.sglang.pages import Pages
from kvrouter_store.identity.blob import blob_name
from kvrouter_store.identity.chain import HASH_BYTES

log = logging.getLogger("sglang.kvstore")

PART = 0
PAGE_HASH = re.compile("[0-9a-f]{64}")


@dataclass(eq=False)
class PageShelf:
    """Puts and gets pages by their keys. Safe in threads. Owns the link: close() ends it."""

    link: StoreLink

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.link.manifest.block_bytes

    def leading(self, keys: Sequence[str]) -> int:
        """How many pages can be loaded, up to the first that cannot."""
        found = 0
        for names in questions(names_of(keys)):
            here = self.link.match(names)
            found += here
            if here * HASH_BYTES < len(names):
                break
        return found

    def put(self, keys: Sequence[str], before: Sequence[str], pages: Pages) -> list[bool]:
        """Store consecutive pages; of each, whether the store has it then.

        before: the keys of the pages that they follow, as far as known: a page leaves the store
        after those that follow it. What the store has is not sent again.
        """
        held = self.leading(keys)
        parent = [key for key in before[-1:] if key not in keys]
        span = range(len(parent) + held, len(parent) + len(keys))
        if not span:
            return [True] * held
        chain, indices = names_of([*parent, *keys]), pages.indices[held:]
        put = self.link.put(PART, chain, span, pages.segments, indices)
        new = [status in THERE for status in put.statuses] if put else [False] * len(span)
        return [True] * held + new

    def get(self, keys: Sequence[str], pages: Pages) -> list[bool]:
        """Load pages; of each, whether it came as it was put. The memory of others holds anything.

        After the first that is not there, none come.
        """
        span = range(len(keys))
        found = self.link.get_into(PART, names_of(keys), span, pages.segments, pages.indices)
        if corrupt := found.count(BlockStatus.CORRUPT):
            log.warning("%d pages were corrupt and are deleted: SGLang computes them", corrupt)
        return [status is BlockStatus.OK for status in found]

    def close(self) -> None:
        """End the connections and the thread. Idempotent."""
        self.link.close()


def name_of(key: str) -> bytes:
    """32 bytes: a page's key is a SHA-256 in hex, chained over its tokens and those before it."""
    return bytes.fromhex(key) if PAGE_HASH.fullmatch(key) else blob_name(key)


def names_of(keys: Iterable[str]) -> bytes:
    """The names of pages, one after another."""
    return b"".join(map(name_of, keys))
