"""Manifests that a client registered, and the ids that the node gave them in its present life."""

import threading

from kvrouter_store import _core
from kvrouter_store._core import RegisterReply
from kvrouter_store.connection.channel import Channel, Registration
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.identity.block import Manifest


def encode_register(request_id: int, manifest: Manifest, engine: str, refusal: str) -> bytes:
    """The REGISTER of a manifest."""
    return _core.encode_register(
        request_id,
        spec=manifest.spec.digest,
        manifest=manifest.digest,
        engine=engine,
        refusal=refusal,
        doc=manifest.doc,
        parts=[(part.digest, part.block_bytes) for part in manifest.parts],
    )


class ManifestIds:
    """Safe in threads. Engines are bound to a connection: each new one announces them again."""

    def __init__(self) -> None:
        self._remembered: dict[bytes, tuple[Manifest, str, str]] = {}
        self._known: dict[bytes, Registration] = {}
        self._lock = threading.Lock()

    def remember(self, manifest: Manifest, engine: str, refusal: str) -> None:
        """Announce this manifest on every connection from now on."""
        with self._lock:
            self._remembered[manifest.digest] = (manifest, engine, refusal)

    def forget(self, manifest: Manifest) -> None:
        """Announce it on no new connection."""
        with self._lock:
            self._remembered.pop(manifest.digest, None)

    def announce(self, channel: Channel, manifest: Manifest, deadline: Deadline) -> Registration:
        """Register the manifest on this connection, unless that was done."""
        _, engine, refusal = self._remembered.get(manifest.digest, (manifest, "", ""))
        known = channel.announced.get((manifest.digest, engine, refusal))
        if known is not None:
            return known
        reply = channel.ask(RegisterReply, deadline, encode_register, manifest, engine, refusal)
        epoch, parts = channel.hello.epoch, tuple(reply.part_ids)
        registration = Registration(epoch, reply.manifest_id, reply.spec_id, parts)
        if not refusal:
            with self._lock:
                self._known[manifest.digest] = registration
        channel.announced[manifest.digest, engine, refusal] = registration
        return registration

    def announce_all(self, channel: Channel, deadline: Deadline) -> None:
        """Register everything that was remembered on a new connection."""
        with self._lock:
            remembered = [manifest for manifest, _, _ in self._remembered.values()]
        for manifest in remembered:
            self.announce(channel, manifest, deadline)

    def of(self, channel: Channel, manifest: Manifest, deadline: Deadline) -> Registration:
        """The manifest at the node behind this connection; registers it if need be."""
        registration = self._known.get(manifest.digest)
        if registration is not None and registration.epoch == channel.hello.epoch:
            return registration
        return self.announce(channel, manifest, deadline)

    def forget_ids(self) -> None:
        """The node does not know an id: ask for all of them again."""
        with self._lock:
            self._known.clear()
