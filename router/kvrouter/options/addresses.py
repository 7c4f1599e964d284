"""Addresses of engines, as users write them and as the router compares them."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

SECURE: Final = "https://"
"""Begins the address of an engine that is reached by HTTPS, where addresses are given."""


def parse_address(text: str) -> str:
    """Bring an engine as users write it (URL or HOST:PORT) to its one form.

    That is `HOST:PORT`, or `https://HOST:PORT` of one that is reached by HTTPS.

    Raises:
        ValueError: with a sentence that names the remedy.
    """
    text = text.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"engine {text!r}: give it as http://HOST:PORT or https://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"engine {text!r}: give only http://HOST:PORT, without path or user")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port:
        raise ValueError(f"engine {text!r}: give it as http://HOST:PORT or HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{SECURE if parts.scheme == 'https' else ''}{host}:{port}"


def bare_address(address: str) -> str:
    """`HOST:PORT` of what `parse_address` returned: an engine's name, however it is reached."""
    return address.removeprefix(SECURE)


def split_address(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`, `[V6]:PORT` or a rank of it into host without brackets and port."""
    host, _, port = address.partition("@")[0].rpartition(":")
    return host.strip("[]"), int(port)
