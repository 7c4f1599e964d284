"""A connection to a node without a client: frames out, replies in, cut at any byte."""

import fcntl
import socket
import struct
import termios
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kvrouter_store import _core
from kvrouter_store.identity.block import Manifest

__all__ = ["Answer", "RawLink"]

PATIENCE_S = 20.0


class Answer(NamedTuple):
    """One reply: its header, its body, its payload."""

    header: _core.Header
    reply: object
    payload: bytes


class RawLink:
    """A greeted connection to a node's Unix socket, or to its TCP port on this host.

    flags: what the HELLO says instead of what a client says (HelloFlags of csrc/wire/wire.h).
        ConnectionRefusedError where the node does not take it.
    """

    def __init__(self, door: str | int, *, flags: int | None = None) -> None:
        family = socket.AF_UNIX if isinstance(door, str) else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(door if isinstance(door, str) else ("127.0.0.1", door))
        self._id = 0
        hello = bytearray(_core.encode_hello(self.next_id(), name="raw"))
        if flags is not None:  # they begin the body
            hello[_core.HEADER_BYTES : _core.HEADER_BYTES + 4] = flags.to_bytes(4, "little")
        reply = self.ask(bytes(hello)).reply
        if isinstance(reply, _core.ErrorReply):
            self.close()
            raise ConnectionRefusedError(reply.message)

    def next_id(self) -> int:
        self._id += 1
        return self._id

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> Answer:
        """The next reply. ConnectionError where the node has closed, TimeoutError if it hangs."""
        header = _core.decode_header(self._exactly(_core.HEADER_BYTES))
        reply = _core.decode_reply(header, self._exactly(header.body_bytes))
        return Answer(header, reply, self._exactly(header.payload_bytes))

    def ask(self, frame: bytes) -> Answer:
        self.send(frame)
        return self.receive()

    def ask_all(self, frames: Sequence[bytes]) -> list[Answer]:
        """Send all, then take all replies."""
        self.send(b"".join(frames))
        return [self.receive() for _ in frames]

    def register(self, manifest: Manifest, parts: Sequence[int] | None = None) -> int:
        """The id of the manifest, or of one like it that has only these of its parts."""
        return self.registered(manifest, parts).manifest_id

    def registered(
        self, manifest: Manifest, parts: Sequence[int] | None = None
    ) -> _core.RegisterReply:
        """All its ids."""
        chosen = range(len(manifest.parts)) if parts is None else parts
        name = manifest.digest if parts is None else bytes([*parts, 255]) + bytes(31 - len(parts))
        reply = self.ask(
            _core.encode_register(
                self.next_id(),
                spec=manifest.spec.digest,
                manifest=name,
                engine="raw",
                refusal="",
                doc=manifest.doc,
                parts=[(manifest.parts[k].digest, manifest.parts[k].block_bytes) for k in chosen],
            )
        ).reply
        assert isinstance(reply, _core.RegisterReply)
        return reply

    @property
    def unread(self) -> int:
        """How much of what was sent the node has not yet taken; 0: all of it."""
        return int(struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0" * 4))[0])

    def close(self) -> None:
        """Cut it, in the middle of whatever it is."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("the node closed the connection")
            data += piece
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
