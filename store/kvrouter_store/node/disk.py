"""The SSD tier from outside: why it cannot be opened, what the log says of it, its last flush.

Moves no bytes and opens none of the tier's files.
"""

import asyncio
import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvrouter_store._core import StoreServer
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused

log = logging.getLogger(__name__)


def refusal(settings: StoreSettings, error: OSError) -> StartRefused | None:
    """Why the disk could not be opened, with the remedy; None for an error of something else."""
    if not settings.disk or error.filename != settings.disk:
        return None
    where, size = f"--disk {settings.disk}", settings.disk_size.human_readable()
    full = f"has no room for {size}: give a smaller --disk-size, or make room"
    sentences = {
        errno.EBUSY: "is used by another node: give each node a folder of its own",
        errno.ENOSPC: full,
        errno.EDQUOT: full,
        errno.EFBIG: f"may have no file of {size}: give a smaller --disk-size, or raise ulimit -f",
        errno.EMEDIUMTYPE: "has a file kvstore.data that is not of this version of the store: move "
        "it away, or give another folder",
    }
    sentence = sentences.get(error.errno or 0, f"cannot be used: {error.strerror}; see --disk-io")
    return StartRefused(f"{where} {sentence}")


@contextmanager
def logging_notices(server: StoreServer) -> Iterator[None]:
    """Log what happens to the disk, when it happens. Needs the running loop."""

    def take() -> None:
        for bad, sentence in server.take_notices():
            log.log(logging.WARNING if bad else logging.INFO, "%s", sentence)

    descriptor = server.notice_fd
    if descriptor < 0:
        yield
        return
    take()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, take)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        take()


async def flush(server: StoreServer, timeout_s: float) -> None:
    """Write what is in memory alone to the disk, within `timeout_s`; the log says how it ended."""
    why, durable, _ = await asyncio.to_thread(server.flush_disk, timeout_s)
    if why:
        log.warning("not everything is on the disk: %s; %d blocks are", why, durable)
    else:
        log.info("%d blocks are durable on the disk", durable)
