"""The client by which a node's HTTP side uses the node itself. Leaves no block behind."""

import os
from hashlib import sha256
from typing import Self

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.results import RegisteredManifest, SharingRefusal
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout
from kvrouter_store.node.settings import StoreSettings

BLOCK_BYTES = 64 << 10
BLOCKS = 2
DEADLINE_S = 4.0


def own_address(settings: StoreSettings, url: str, unix_path: str | None) -> tuple[str, ClientTls]:
    """Where the node reaches itself, and by which files.

    It trusts its own certificate, whatever hosts that names. If clients must show a certificate,
    it uses the Unix socket where there is one: the node's certificate need not be one for clients.
    """
    if not settings.tls_cert_file:
        return url, ClientTls()
    if settings.tls_ca_file and unix_path:
        return f"kv+unix://{os.path.abspath(unix_path)}", ClientTls()
    own = settings.tls_cert_file
    return url, ClientTls(
        ca_file=own, cert_file=own, key_file=settings.tls_key_file, check_host=False
    )


class OwnClient:
    """Uses the node at `url`, each time on a connection of its own.

    token: of the caller for whom the node is used.
    """

    def __init__(self, url: str, tls: ClientTls | None = None, token: str = "") -> None:
        self._url = url
        self._tls = tls or ClientTls()
        self._token = token

    def on_behalf(self, token: str) -> Self:
        """The same for another caller."""
        return type(self)(self._url, self._tls, token)

    def manifests(self) -> list[RegisteredManifest]:
        """What is registered, and by which living engines."""
        with self._client() as client:
            return client.manifests()

    def refusals(self) -> list[SharingRefusal]:
        """Which living engines share nothing, and why."""
        with self._client() as client:
            return client.refusals()

    def selftest(self) -> None:
        """Put, get, compare and delete. KVStoreError where a block does not come back as it was."""
        manifest = _manifest()
        seed = os.urandom(16)
        hashes = b"".join(sha256(seed + bytes([k])).digest() for k in range(BLOCKS))
        sent, received = os.urandom(BLOCK_BYTES * BLOCKS), bytearray(BLOCK_BYTES * BLOCKS)
        span, indices = range(BLOCKS), list(range(BLOCKS))
        with self._client() as client:
            source = Segments.over(sent, BLOCK_BYTES)
            stored = client.put(manifest, 0, hashes, span, source, indices)
            if stored.stored != BLOCKS:
                raise KVStoreError(f"blocks were not stored: {stored.statuses}")
            try:
                sink = Segments.over(received, BLOCK_BYTES, writable=True)
                statuses = client.get_into(manifest, 0, hashes, span, sink, indices)
            finally:
                client.delete(manifest, hashes)
        if statuses != [BlockStatus.OK] * BLOCKS or received != sent:
            raise KVStoreError(f"blocks did not come back as they were put: {statuses}")

    def _client(self) -> StoreClient:
        return StoreClient(
            self._url,
            transport="unix" if self._url.startswith("kv+unix:") else "tcp",
            deadline_s=DEADLINE_S,
            name="http side",
            token=self._token,
            tls=self._tls,
        )


def _manifest() -> Manifest:
    spec = CacheSpec("kvstore-selftest", "", "uint8", 1, "sha256_cbor", root="00" * 32)
    layout = Layout.opaque("kvstore-selftest")
    return Manifest(spec, (Part((0, 1), (0, 1), 0, BLOCK_BYTES, layout),))
