"""The short way of a put or get over a socket: one native call on a connection that is known.

What a call costs in Python is a third of what one small block costs. All that is out of the
ordinary is left to the long way, which knows what to do about it and how to say what is wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from kvstore._core import BlockStatus, ErrorReply, KnownLink, Status
from kvstore.answers import Registration
from kvstore.block import Manifest
from kvstore.connection import Channel, Deadline, LinkLost, refused
from kvstore.errors import DeadlineExceeded
from kvstore.lane import Lane
from kvstore.spans import BATCH_BLOCKS, BATCH_BYTES

__all__ = ["Shortcut"]

P = ParamSpec("P")
Native = Callable[Concatenate[KnownLink, P], list[BlockStatus] | ErrorReply | None]


@dataclass(frozen=True, slots=True)
class _Known:
    manifest: Manifest
    channel: Channel
    link: KnownLink


class Shortcut:
    """Knows the connection and the manifest of the last operation. Safe in threads.

    lane: whose channels these are. late: is told for how many seconds nobody answered.
    """

    def __init__(self, lane: Lane, late: Callable[[float], None]) -> None:
        self._lane = lane
        self._late = late
        self._known: _Known | None = None

    def learn(self, channel: Channel, manifest: Manifest, registration: Registration) -> None:
        """The channel, locked by the caller, has no pool, and the manifest is registered there."""
        sizes = [part.block_bytes for part in manifest.parts]
        link = KnownLink(
            channel.link,
            registration.manifest_id,
            sizes,
            most_blocks=BATCH_BLOCKS,
            most_bytes=BATCH_BYTES,
        )
        self._known = _Known(manifest, channel, link)

    def forget(self) -> None:
        """Until it learns again, everything goes the long way."""
        self._known = None

    def move(
        self,
        manifest: Manifest,
        deadline: Deadline,
        native: Native[P],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> list[BlockStatus] | None:
        """What `native` returns; None where it was not tried, or failed: take the long way.

        Raises StoreRefused, DeadlineExceeded, ValueError and IndexError as the long way does.
        """
        known = self._known
        if known is None or known.manifest is not manifest:
            return None
        channel = known.channel
        if not channel.lock.acquire(blocking=False):
            return None
        if channel.broken:  # its descriptor may be another's by now
            self._known = None
            channel.lock.release()
            return None
        channel.pending = True
        try:
            answer = native(known.link, *arguments, **options)
            # After a PUT that it refuses the server reads nothing more.
            channel.pending = isinstance(answer, ErrorReply) and native is KnownLink.put
        except OSError as error:
            self._failed(channel, error, deadline)
            return None
        finally:
            if channel.pending:
                self._known = None
            self._lane.give(channel)
        return _understood(answer)

    def _failed(self, channel: Channel, error: OSError, deadline: Deadline) -> None:
        try:
            channel.lost(error)
        except DeadlineExceeded:
            self._late(deadline.used_s())
            raise
        except LinkLost:  # the long way tries once more
            return


def _understood(answer: list[BlockStatus] | ErrorReply | None) -> list[BlockStatus] | None:
    if not isinstance(answer, ErrorReply):
        return answer
    if answer.status == Status.UNKNOWN_MANIFEST:  # the long way knows what to do then
        return None
    raise refused(answer.status, answer.message)
