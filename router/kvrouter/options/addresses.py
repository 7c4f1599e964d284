"""Addresses of engines: read from URLs or HOST:PORT, and compared in one form.

An operator may give an engine a label, `LABEL=HOST:PORT`, as etcd's members have one. People read
it; the engine's name in metrics, logs and messages stays its address.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

SECURE: Final = "https://"  # prefix of the address of an engine with HTTPS
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def parse_address(text: str) -> str:
    """The one form of an engine's URL or HOST:PORT: `[LABEL=][https://]HOST:PORT`.

    ValueError: a sentence with the remedy.
    """
    label, sign, place = text.strip().partition("=")
    if not sign or "/" in label:  # in a query, which the rest refuses
        return _parse_place(text.strip())
    if not _LABEL.fullmatch(label):
        raise ValueError(
            f"engine {text!r}: give it as LABEL=HOST:PORT, with at most 63 letters, digits, `.`, "
            "`_` and `-` as LABEL"
        )
    return f"{label}={_parse_place(place)}"


def _parse_place(text: str) -> str:
    """The same without a label."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"engine {text!r}: give it as http://HOST:PORT or https://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"engine {text!r}: give only http://HOST:PORT, without path or user")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or "=" in parts.hostname:
        raise ValueError(f"engine {text!r}: give it as http://HOST:PORT or HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{SECURE if parts.scheme == 'https' else ''}{host}:{port}"


def bare_address(address: str) -> str:
    """`HOST:PORT` of a result of `parse_address`: the name of an engine."""
    return unlabelled(address).removeprefix(SECURE)


def unlabelled(address: str) -> str:
    """A result of `parse_address` without its label."""
    return address.rpartition("=")[2]


def label_of(address: str) -> str:
    """The label in a result of `parse_address`, or ""."""
    return address.rpartition("=")[0]


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets and port of `HOST:PORT`, `[V6]:PORT`, or a rank of it."""
    host, _, port = address.partition("@")[0].rpartition(":")
    return host.strip("[]"), int(port)
