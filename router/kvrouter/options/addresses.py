"""Addresses of engines: read from URLs or HOST:PORT, and compared in one form."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

SECURE: Final = "https://"
"""Prefix of the address of an engine with HTTPS."""


def parse_address(text: str) -> str:
    """The one form of an engine's URL or HOST:PORT: `HOST:PORT`, or `https://HOST:PORT`.

    Raises:
        ValueError: a sentence with the remedy.
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
    """`HOST:PORT` of a result of `parse_address`: the name of an engine, with or without HTTPS."""
    return address.removeprefix(SECURE)


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets and port of `HOST:PORT`, `[V6]:PORT`, or a rank of it."""
    host, _, port = address.partition("@")[0].rpartition(":")
    return host.strip("[]"), int(port)
