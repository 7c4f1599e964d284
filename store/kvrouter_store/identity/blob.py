"""Blobs: bytes of which an engine gives only a key and a size, next to blocks of known tokens."""

from collections.abc import Mapping
from hashlib import sha256

from kvrouter_store.identity.block import CacheSpec, Manifest, Part, canonical_json
from kvrouter_store.identity.layout import Layout, Scalar


def blob_manifest(
    dialect: str, model: str, blob_bytes: int, fields: Mapping[str, Scalar]
) -> Manifest:
    """The manifest of all blobs of one size that engines with equal `fields` can exchange.

    `dialect` says whose keys these are. The keys must name model, tokens and rank where `fields`
    do not: the store knows nothing else about the bytes.
    """
    root = sha256(canonical_json(dict(fields))).hexdigest()
    spec = CacheSpec(model, "", f"{blob_bytes} bytes", 1, f"blob:{dialect}", root)
    return Manifest(
        spec, (Part((0, 1), (0, 1), 0, blob_bytes, Layout.opaque(dialect, dict(fields))),)
    )


def blob_name(key: str) -> bytes:
    """32 bytes that name the blob of a key."""
    return sha256(key.encode()).digest()
