"""The short way of a put, get or match: one native call on a connection that is known.

What a call costs in Python is a third of what one small block costs over a socket, and a tenth of
what 1 MiB costs in a mapped pool. All that is out of the ordinary is left to the long way, which
knows what to do about it and how to say what is wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvstore import _core
from kvstore._core import (
    BlockStatus,
    ErrorReply,
    KnownLink,
    KnownPool,
    KnownWay,
    MatchReply,
    Status,
)
from kvstore.answers import PutResult, Registration
from kvstore.block import Manifest
from kvstore.connection import Channel, LinkLost, refused
from kvstore.deadline import MIN_RATE_BYTES_S
from kvstore.errors import DeadlineExceeded
from kvstore.lane import Lane
from kvstore.spans import BATCH_BLOCKS, BATCH_BYTES

__all__ = ["Shortcut"]

Answer: TypeAlias = PutResult | list[BlockStatus] | MatchReply


@dataclass(frozen=True, slots=True)
class _Known:
    manifest: Manifest
    registration: Registration
    lane: Lane
    channel: Channel
    link: KnownWay

    def stands_for(self, channel: Channel, manifest: Manifest, registration: Registration) -> bool:
        """Whether it would be made of these again."""
        return (
            self.channel is channel
            and self.manifest is manifest
            and self.registration is registration
        )


class Shortcut:
    """Knows the connection and the manifest of the last put, or of the last read. Safe in threads.

    `put`, `get` and `match` are the native calls. They take the channel, where that needs no wait,
    and give it back.

    late: is called where the node did not answer in time.
    """

    def __init__(self, late: Callable[[], None]) -> None:
        self._late = late
        self._native = _core.Shortcut(PutResult, self._settle)
        self.put, self.get, self.match = self._native.put, self._native.get, self._native.match

    def learn(
        self, lane: Lane, channel: Channel, manifest: Manifest, registration: Registration
    ) -> None:
        """The lane's channel, locked by the caller, has the manifest registered."""
        known = self._native.known
        if known is not None and known.stands_for(channel, manifest, registration):
            return
        link = _known_link(channel, manifest, registration)
        if link is not None:
            self._native.learn(_Known(manifest, registration, lane, channel, link))

    def forget(self) -> None:
        """Until it learns again, everything goes the long way."""
        self._native.forget()

    def _settle(
        self,
        known: _Known,
        answer: Answer | ErrorReply | None,
        error: BaseException | None,
        began: float,
        refusal_ends: bool,
    ) -> Answer | None:
        """End a call that was out of the ordinary, and give its channel back.

        None: take the long way. Raises StoreRefused, DeadlineExceeded, ValueError and IndexError as
        the long way does.
        """
        channel = known.channel
        # After a PUT that it refuses the server reads nothing more.
        refusal = isinstance(answer, ErrorReply)
        channel.pending = error is not None or (refusal and refusal_ends)
        try:
            if isinstance(error, OSError):
                self._failed(channel, error, began)
            elif error is not None:
                raise error
        finally:
            if channel.pending or channel.broken:
                self.forget()
            known.lane.give(channel)
        if not isinstance(answer, ErrorReply):
            return answer
        if answer.status != Status.UNKNOWN_MANIFEST:  # the long way knows what to do about that
            raise refused(answer.status, answer.message)
        return None

    def _failed(self, channel: Channel, error: OSError, began: float) -> None:
        try:
            channel.lost(error)
        except DeadlineExceeded:
            self._late()
            raise
        except LinkLost:  # the long way tries once more
            return


def _known_link(
    channel: Channel, manifest: Manifest, registration: Registration
) -> KnownWay | None:
    sizes = [part.block_bytes for part in manifest.parts]
    if channel.pool is None:
        return KnownLink(
            channel.link,
            registration.manifest_id,
            sizes,
            PutResult,
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
        channel.hello.node,
        PutResult,
        most_blocks=BATCH_BLOCKS,
        most_bytes=BATCH_BYTES,
    )
