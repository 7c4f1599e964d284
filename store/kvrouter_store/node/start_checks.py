"""What a node does not start with: open to other hosts, readable secrets, wrong quotas, no disk."""

import ipaddress
import os
import re
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from kvrouter_store._core import TlsContext
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.node.quotas import MIN_QUOTA_BYTES, quota_bytes
from kvrouter_store.node.settings import StoreSettings

if TYPE_CHECKING:
    import ssl

TenantToken = tuple[str, str]
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
LINE = "write TENANT:TOKEN on each line"
MAX_FILE_BYTES = 1 << 20
MIN_DISK_BYTES = 16 << 20
MAX_TENANTS = 1024


class StartRefused(Exception):
    """The node does not start so; the message is one sentence with the remedy."""


def tokens_of(settings: StoreSettings) -> list[TenantToken]:
    """The tenants of a node that may start, with their tokens; none where it asks for none.

    Raises StartRefused where the file of tokens cannot be used, or where the node would serve other
    hosts without a token and without --insecure.
    """
    if settings.token_file:
        return _read(Path(settings.token_file))
    if settings.insecure or is_loopback(settings.host):
        return []
    raise StartRefused(
        f"any host that reaches {settings.host} could read and write KV: give --token-file FILE, "
        "or listen on --host 127.0.0.1, or say --insecure where the network is trusted"
    )


def quotas_of(settings: StoreSettings, tenants: list[TenantToken]) -> dict[str, int]:
    """The bytes of the pool that each tenant with a quota can count on.

    Raises StartRefused where a quota is of no tenant, or leaves nothing for tenants without one.
    """
    quotas = quota_bytes(settings.quota, settings.memory)
    names = [name for name, _ in tenants]
    for tenant in quotas:
        if tenant not in names:
            raise StartRefused(
                f"--quota names tenant {tenant!r}, and --token-file does not; give it a token there"
            )
    without = [name for name in names if name not in quotas]
    left_bytes = settings.memory - sum(quotas.values())
    if quotas and without and left_bytes < MIN_QUOTA_BYTES:
        raise StartRefused(
            f"the quotas leave nothing of the pool for tenant {without[0]!r}, which has none; "
            "give it one, lower them, or raise --memory"
        )
    return quotas


def tls_of(settings: StoreSettings) -> TlsContext | None:
    """The context for clients over TCP; None where the node is to be plain.

    Raises StartRefused where a file cannot be used, a key can be read by others, or libssl is
    missing.
    """
    cert, key, ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file
    if not (cert or key or ca):
        return None
    if not (cert and key):
        raise StartRefused("TLS needs both: give --tls-cert-file FILE and --tls-key-file FILE")
    try:
        mode = Path(key).stat().st_mode
    except OSError as error:
        raise StartRefused(f"--tls-key-file {key}: {error.strerror}; name a PEM file") from None
    _check_mode("--tls-key-file", Path(key), mode)
    try:
        return TlsContext.server(cert_file=cert, key_file=key, ca_file=ca)
    except ValueError as error:
        raise StartRefused(str(error)) from None


def https_of(settings: StoreSettings) -> "ssl.SSLContext | None":
    """The context of the HTTP side, of the same files; None where the node is to be plain.

    OSError where a file cannot be used: call `tls_of` first, which says so in a sentence.
    """
    if not settings.tls_cert_file:
        return None
    import ssl  # noqa: PLC0415 (some Pythons have none)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    return context


def plain_wire_warning(settings: StoreSettings) -> str | None:
    """A sentence for a node that serves other hosts with tokens and without TLS."""
    if settings.tls_cert_file or not settings.token_file or is_loopback(settings.host):
        return None
    return (
        f"tokens and KV travel in the clear to and from {settings.host}: give --tls-cert-file and "
        "--tls-key-file, or keep the wire to a network that you trust with them"
    )


def check_disk(settings: StoreSettings) -> None:
    """StartRefused where the settings of the SSD tier cannot work."""
    if not settings.disk:
        return
    folder = Path(settings.disk)
    if settings.disk_size < MIN_DISK_BYTES:
        raise StartRefused(
            f"--disk {folder} needs --disk-size, at least 16MiB: how much of that disk it may have"
        )
    if not folder.is_dir():
        raise StartRefused(f"--disk {folder} is not a folder: make it with mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartRefused(
            f"--disk {folder} cannot be written by this user: give another folder, or this one to "
            "the user"
        )


def _read(path: Path) -> list[TenantToken]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StartRefused(f"--token-file {path}: {error.strerror}; name a file of it") from None
    _check_mode("--token-file", path, mode)
    if len(content) > MAX_FILE_BYTES:
        raise StartRefused(f"--token-file {path} is longer than 1 MiB; {LINE}")
    try:
        return _parse(content.decode("utf-8"))
    except ValueError as error:
        raise StartRefused(f"--token-file {path}: {error}") from None


def _check_mode(flag: str, path: Path, mode: int) -> None:
    """The group may read a secret: Kubernetes gives it to a pod by its group."""
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise StartRefused(f"{flag} {path} can be read by others: chmod 600 {path}")


def _parse(text: str) -> list[TenantToken]:
    """The tenants of a file. ValueError says what to write, and repeats no token."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        tenant, colon, token = line.strip().partition(":")
        if not colon or not token or not TENANT.fullmatch(tenant):
            raise ValueError(f"line {number} is not understood; {LINE}")
        try:
            check_token(token)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if tenant in found:
            raise ValueError(f"line {number} names tenant {tenant!r} again; give it one line")
        if token in found.values():
            raise ValueError(f"line {number} has another tenant's token; give each its own")
        found[tenant] = token
    if not 0 < len(found) <= MAX_TENANTS:
        raise ValueError(f"it names {len(found)} tenants, not 1 to {MAX_TENANTS}; {LINE}")
    return list(found.items())


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it, or no host (a name that does not resolve)."""
    try:
        found = socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)
