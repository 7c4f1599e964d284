"""A blocking client's connection under TLS, and the choice between it and a plain one."""

from typing import NoReturn

from kvstore._core import TlsContext, TlsError, TlsLink
from kvstore.address import Address
from kvstore.connection import Access, Channel, Deadline
from kvstore.errors import DeadlineExceeded, Untrusted
from kvstore.tls import sentence

__all__ = ["TlsChannel", "open_channel"]


class TlsChannel(Channel):
    """As a Channel over TCP. Untrusted where TLS fails: before anything of the client was sent.

    (A node that wants another certificate says so after the handshake: with its first reply.)
    """

    def __init__(
        self, address: Address, deadline: Deadline, *, name: str, token: str, context: TlsContext
    ) -> None:
        self._address = address
        self._context = context
        super().__init__(address, deadline, name=name, token=token)

    @property
    def wire(self) -> TlsLink:
        """What payloads travel on."""
        return self._tls

    def send(self, frame: bytes, deadline: Deadline) -> None:
        """Send a whole frame."""
        self.pending = True
        try:
            self._tls.send(frame, deadline.left_s())
        except (OSError, DeadlineExceeded) as error:
            self.lost(error)

    def alive(self) -> bool:
        """Whether the link still stands, as far as can be seen without a round trip."""
        return self.usable and self._tls.quiet()

    def lost(self, error: BaseException) -> NoReturn:
        """Give the connection up because of `error`."""
        if isinstance(error, TlsError):
            self.close()
            raise Untrusted(sentence(str(error), self._address)) from error
        super().lost(error)

    def _begin(self, deadline: Deadline) -> None:
        self._tls = TlsLink(self._context, self.fd, self._address.host)
        try:
            self._tls.handshake(deadline.left_s())
        except (OSError, DeadlineExceeded) as error:
            self.lost(error)

    def _receive_some(self, most: int, deadline: Deadline) -> bytes:
        try:
            return self._tls.recv(most, deadline.left_s())
        except (OSError, DeadlineExceeded) as error:
            self.lost(error)


def open_channel(
    address: Address,
    deadline: Deadline,
    *,
    name: str,
    token: str = "",
    tls: TlsContext | None = None,
    access: Access = Access.NONE,
) -> Channel:
    """Connect and say HELLO: under `tls` where the address is of that kind (kvs://)."""
    if address.tls:
        assert tls is not None  # native_context() makes one for every such address
        return TlsChannel(address, deadline, name=name, token=token, context=tls)
    return Channel(address, deadline, name=name, token=token, access=access)
