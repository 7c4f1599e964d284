"""Where a node is: its URL, and the Unix socket that its HELLO names. Opens nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal["shm", "unix", "tcp", "rdma"]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP endpoint (host, port; with `tls` never without TLS) or a Unix socket (path)."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"kv+unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'kvs' if self.tls else 'kv'}://{host}:{self.port}"


def parse_url(url: str) -> Address:
    """The address of kv://HOST:PORT, kvs://HOST:PORT (TLS) or kv+unix:///PATH.

    ValueError names the remedy. No URL holds a token: logs and process lists show URLs.
    """
    if "@" in url:
        raise ValueError(
            "a store address holds no token: write kv://HOST:PORT, and give the token as a setting "
            "of its own (KVROUTER_STORE_TOKEN)"
        )
    remedy = (
        f"store address {url!r} is not understood; write kv://HOST:PORT, kvs://HOST:PORT for TLS, "
        "or kv+unix:///PATH"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(remedy) from error
    if parts.scheme == "kv+unix" and parts.path and not parts.netloc:
        return Address(path=parts.path)
    bare = parts.path in {"", "/"} and not parts.query
    if parts.scheme in {"kv", "kvs"} and parts.hostname and port and bare:
        return Address(host=parts.hostname, port=port, tls=parts.scheme == "kvs")
    raise ValueError(remedy)


def local_boot_id() -> str:
    """The id of the running kernel: a node that reports the same runs on this host."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def nearer_path(hello_path: str, hello_boot_id: str) -> str:
    """The Unix socket that a HELLO names, if it can be reached from here; else ''."""
    here = hello_boot_id != "" and hello_boot_id == local_boot_id()
    return hello_path if here and hello_path and Path(hello_path).is_socket() else ""
