"""The SSD tier from outside: what a node does not start with, what it tells, and its last flush.

Moves no bytes and opens none of the tier's files.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from kvrouter_store.node.settings import MIB, StoreSettings
from kvrouter_store.node.start_checks import StartRefused

__all__ = ["Flushable", "NoticeSource", "check_disk", "flush", "refusal", "tell", "telling"]

log = logging.getLogger(__name__)
MIN_DISK_BYTES = 16 * MIB


class NoticeSource(Protocol):
    """What tells of its disk, as `kvrouter_store._core.StoreServer`."""

    @property
    def notice_fd(self) -> int:
        """Readable while there is something to tell; -1 without a disk."""
        ...

    def take_notices(self) -> list[tuple[bool, str]]:
        """Whether it is bad, and a sentence; each once."""
        ...


class Flushable(Protocol):
    """What has blocks to bring to its disk, as `kvrouter_store._core.StoreServer`."""

    def flush_disk(self, timeout_s: float) -> tuple[str, int, int]:
        """Why it did not come to an end ("" if it did), durable blocks, parts skipped so far."""
        ...


def check_disk(settings: StoreSettings) -> None:
    """StartRefused where the settings of the SSD tier cannot be meant."""
    if not settings.disk:
        return
    folder = Path(settings.disk)
    if settings.disk_size < MIN_DISK_BYTES:
        raise StartRefused(
            f"--disk {folder} needs --disk-size, at least 16MiB: how much of that disk it may have"
        )
    if not folder.is_dir():
        raise StartRefused(f"--disk {folder} is not a folder: make it with mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartRefused(
            f"--disk {folder} cannot be written by this user: give another folder, or this one to "
            "the user"
        )


def refusal(settings: StoreSettings, error: OSError) -> StartRefused | None:
    """Why the disk could not be opened, with the remedy; None for an error of something else."""
    if not settings.disk or error.filename != settings.disk:
        return None
    where, size = f"--disk {settings.disk}", settings.disk_size.human_readable()
    sentences = {
        errno.EBUSY: "is used by another node: give each node a folder of its own",
        errno.ENOSPC: f"has no room for {size}: give a smaller --disk-size, or make room",
        errno.EFBIG: f"may have no file of {size}: give a smaller --disk-size, or raise ulimit -f",
        errno.EMEDIUMTYPE: "has a file kvstore.data that is not of this version of the store: move "
        "it away, or give another folder",
    }
    sentence = sentences.get(error.errno or 0, f"cannot be used: {error.strerror}; see --disk-io")
    return StartRefused(f"{where} {sentence}")


def tell(source: NoticeSource) -> None:
    """Log what happened to the disk since the last time."""
    for bad, sentence in source.take_notices():
        log.log(logging.WARNING if bad else logging.INFO, "%s", sentence)


@contextmanager
def telling(source: NoticeSource) -> Iterator[None]:
    """Log what happens to the disk, when it happens. Needs the running loop."""
    descriptor = source.notice_fd
    if descriptor < 0:
        yield
        return
    tell(source)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, tell, source)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        tell(source)


async def flush(node: Flushable, timeout_s: float) -> None:
    """Bring what is in memory alone to the disk, within `timeout_s`; the log says how it ended."""
    why, durable, _ = await asyncio.to_thread(node.flush_disk, timeout_s)
    if why:
        log.warning("not everything is on the disk: %s; %d blocks are", why, durable)
    else:
        log.info("%d blocks are durable on the disk", durable)
