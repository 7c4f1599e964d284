"""Certificates that a test makes for itself: CAs, and what they have signed, as PEM files."""

import datetime as dt
from pathlib import Path
from typing import NamedTuple

import trustme

from kvrouter_store._core import TlsContext
from kvrouter_store.connection.tls import ClientTls

LONG_AGO = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)


class Signed(NamedTuple):
    """Files of a certificate and its key, which only their owner can read."""

    cert_file: str
    key_file: str

    def server(self, ca_file: str = "") -> TlsContext:
        """What a node shows; with `ca_file` it asks for clients' certificates."""
        return TlsContext.server(cert_file=self.cert_file, key_file=self.key_file, ca_file=ca_file)


class Authority:
    """A CA whose files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self._ca = trustme.CA(organization_name=name)
        self._count = 0
        self.ca_file = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    @property
    def trust(self) -> ClientTls:
        """What a client needs that trusts this CA."""
        return ClientTls(ca_file=self.ca_file)

    def sign(self, *names: str, expired: bool = False) -> Signed:
        """A certificate of these names and addresses."""
        leaf = self._ca.issue_cert(
            *(names or ("localhost", "127.0.0.1", "::1")),
            not_before=LONG_AGO if expired else None,
            not_after=LONG_AGO + dt.timedelta(days=1) if expired else None,
        )
        self._count += 1
        cert = self._folder / f"{self._name}-{self._count}.pem"
        key = self._folder / f"{self._name}-{self._count}.key"
        key.touch(0o600)
        leaf.private_key_pem.write_to_path(str(key))
        for at, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(str(cert), append=at > 0)
        return Signed(str(cert), str(key))

    def client(self, *names: str) -> ClientTls:
        """A client that trusts this CA and shows a certificate of it."""
        shown = self.sign(*names)
        return ClientTls(self.ca_file, shown.cert_file, shown.key_file)
