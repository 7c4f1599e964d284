"""A blocking client's connection under TLS, and the choice between it and a plain one."""

from typing import NoReturn

from kvrouter_store._core import Link, TlsContext, TlsError
from kvrouter_store.connection.address import Address
from kvrouter_store.connection.channel import Access, Channel, Deadline
from kvrouter_store.connection.tls import sentence
from kvrouter_store.errors import Untrusted

__all__ = ["TlsChannel", "open_channel"]


class TlsChannel(Channel):
    """As a Channel over TCP. Untrusted where TLS fails: before anything of the client was sent.

    (A node that wants another certificate says so after the handshake: with its first reply.)
    """

    def __init__(
        self,
        address: Address,
        deadline: Deadline,
        *,
        name: str,
        token: str,
        context: TlsContext,
    ) -> None:
        self._address = address
        self._context = context
        super().__init__(address, deadline, name=name, token=token)

    def lost(self, error: BaseException) -> NoReturn:
        """Give the connection up because of `error`."""
        if isinstance(error, TlsError):
            self.close()
            raise Untrusted(sentence(str(error), self._address)) from error
        super().lost(error)

    def _begin(self, fd: int, deadline: Deadline) -> Link:
        link = Link(fd, self._context, self._address.host)
        try:
            link.handshake(deadline.at)
        except OSError as error:
            self.lost(error)
        return link


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
