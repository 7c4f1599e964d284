"""The short way of a put or get: one native call on a connection that is known.

What a call costs in Python is a third of what one small block costs over a socket, and a tenth of
what 1 MiB costs in a mapped pool. All that is out of the ordinary is left to the long way, which
knows what to do about it and how to say what is wrong.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore._core import BlockStatus, ErrorReply, KnownLink, KnownPool, Segments, Status
from kvstore.answers import PutResult, Registration
from kvstore.block import Manifest
from kvstore.connection import Channel, LinkLost, refused
from kvstore.deadline import MIN_RATE_BYTES_S
from kvstore.errors import DeadlineExceeded
from kvstore.lane import Lane
from kvstore.spans import BATCH_BLOCKS, BATCH_BYTES

__all__ = ["Shortcut"]


@dataclass(frozen=True, slots=True)
class _Known:
    manifest: Manifest
    registration: Registration
    lane: Lane
    channel: Channel
    link: KnownLink | KnownPool
    acquire: Callable[[bool], bool]  # of the channel's lock

    def stands_for(self, channel: Channel, manifest: Manifest, registration: Registration) -> bool:
        """Whether it would be made of these again."""
        return (
            self.channel is channel
            and self.manifest is manifest
            and self.registration is registration
        )


class Shortcut:
    """Knows the connection and the manifest of the last put, or of the last get. Safe in threads.

    late: is told for how many seconds nobody answered.
    """

    def __init__(self, late: Callable[[float], None]) -> None:
        self._late = late
        self._known: _Known | None = None

    def learn(
        self, lane: Lane, channel: Channel, manifest: Manifest, registration: Registration
    ) -> None:
        """The lane's channel, locked by the caller, has the manifest registered."""
        known = self._known
        if known is not None and known.stands_for(channel, manifest, registration):
            return
        link = _known_link(channel, manifest, registration)
        if link is not None:
            acquire = channel.lock.acquire
            self._known = _Known(manifest, registration, lane, channel, link, acquire)

    def forget(self) -> None:
        """Until it learns again, everything goes the long way."""
        self._known = None

    def put(  # noqa: PLR0917
        self,
        manifest: Manifest,
        part: int,
        hashes: bytes,
        span: range,
        segments: Segments,
        indices: Sequence[int],
        began: float,
        deadline_s: float,
    ) -> PutResult | None:
        """As the client's put; None where it was not tried, or failed: take the long way.

        It ends as Deadline(deadline_s, payload, began) says. Raises StoreRefused, DeadlineExceeded,
        ValueError and IndexError as the long way does.
        """
        known = self._known
        if known is None or known.manifest is not manifest or not known.acquire(False):
            return None
        channel = known.channel
        try:
            if channel.broken:  # its descriptor may be another's by now
                return None
            channel.pending = True
            answer = known.link.put(part, hashes, span, segments, indices, began + deadline_s)
            # After a PUT that it refuses the server reads nothing more.
            channel.pending = isinstance(answer, ErrorReply)
        except OSError as error:
            self._failed(channel, error, began)
            return None
        finally:
            if channel.pending or channel.broken:
                self._known = None
            known.lane.give(channel)
        if isinstance(answer, tuple):
            return PutResult(answer)
        _raise_refusal(answer)
        return None

    def get(  # noqa: PLR0917
        self,
        manifest: Manifest,
        part: int,
        hashes: bytes,
        span: range,
        segments: Segments,
        indices: Sequence[int],
        verify: bool,
        began: float,
        deadline_s: float,
    ) -> list[BlockStatus] | None:
        """As the client's get_into, and as `put`; None also where a block came corrupt."""
        known = self._known
        if known is None or known.manifest is not manifest or not known.acquire(False):
            return None
        channel, ends = known.channel, began + deadline_s
        try:
            if channel.broken:
                return None
            channel.pending = True
            answer = known.link.get(part, hashes, span, segments, indices, verify, ends)
            channel.pending = False
        except OSError as error:
            self._failed(channel, error, began)
            return None
        finally:
            if channel.pending or channel.broken:
                self._known = None
            known.lane.give(channel)
        if isinstance(answer, list):
            return answer
        _raise_refusal(answer)
        return None

    def _failed(self, channel: Channel, error: OSError, began: float) -> None:
        try:
            channel.lost(error)
        except DeadlineExceeded:
            self._late(time.monotonic() - began)
            raise
        except LinkLost:  # the long way tries once more
            return


def _known_link(
    channel: Channel, manifest: Manifest, registration: Registration
) -> KnownLink | KnownPool | None:
    sizes = [part.block_bytes for part in manifest.parts]
    if channel.pool is None:
        return KnownLink(
            channel.link,
            registration.manifest_id,
            sizes,
            most_blocks=BATCH_BLOCKS,
            most_bytes=BATCH_BYTES,
            rate_bytes_s=MIN_RATE_BYTES_S,
        )
    if channel.directory is None:
        return None
    return KnownPool(
        channel.link,
        channel.pool,
        channel.directory,
        channel.writer,
        registration.names,
        registration.manifest_id,
        sizes,
        most_blocks=BATCH_BLOCKS,
        most_bytes=BATCH_BYTES,
    )


def _raise_refusal(answer: ErrorReply | None) -> None:
    """Unless the long way knows what to do about it."""
    if answer is not None and answer.status != Status.UNKNOWN_MANIFEST:
        raise refused(answer.status, answer.message)
