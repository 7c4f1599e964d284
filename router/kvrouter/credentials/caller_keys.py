"""API keys of callers, from a YAML file of names and hashes, or from flags.

The router keeps the SHA-256 of a key, never the key (one of `kvrouter key new` has 256 random
bits). Messages never repeat a file or a flag, which may hold a key.
"""

from __future__ import annotations

import re
import stat
from hashlib import sha256
from secrets import token_urlsafe
from typing import Annotated, Any, Final

import msgspec
import msgspec.structs
import yaml

from kvrouter.options.bounded_yaml import load_bounded
from kvrouter.options.secret_file import read_private

MAX_KEY_BYTES: Final = 1024
PREFIX: Final = "kvr-"  # of keys that `kvrouter key new` makes, so that tools find leaked ones
NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_BYTES}}}")
_HASH: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LINE: Final = "write a line `NAME: sha256:HASH`, as `kvrouter key new NAME` prints it"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Burst = Annotated[float, msgspec.Meta(ge=1)]


class _Limits(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a caller may use; None is no limit. The bursts are requests, or tokens, at once."""

    models: frozenset[str] | None = None
    requests_per_s: Positive | None = None
    request_burst: Burst | None = None
    tokens_per_min: Positive | None = None
    token_burst: Burst | None = None
    max_concurrent: Count | None = None


class _Entry(_Limits, frozen=True):
    key: str | list[str]


class Key(_Limits, frozen=True):
    """One caller: its name in logs, metrics and the fair queue, its keys by SHA-256, its limits."""

    name: str
    digests: tuple[bytes, ...]


class _UniqueNames(yaml.SafeLoader):
    """Refuses a name that occurs twice: the limits of the first would be lost silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # `_key` refuses it
            name = self.construct_object(key)
            if name in seen:
                raise ValueError(f"{_shown(name)} occurs twice; give it one entry")
            seen.add(name)
        return super().construct_mapping(node, deep)


def digest(key: str) -> bytes:
    """The SHA-256 of a key."""
    return sha256(key.encode("latin-1")).digest()


def new_key() -> str:
    """A new key of 256 random bits."""
    return PREFIX + token_urlsafe(32)


def file_line(name: str, key: str) -> str:
    """The line of the file of keys for `key`."""
    return f"{name}: sha256:{digest(key).hex()}"


def check_key(key: str) -> str:
    """Return the key. ValueError: it cannot be sent in a header; a sentence without the key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"give a key of 1 to {MAX_KEY_BYTES} ASCII characters without blanks")
    return key


def plain_keys(given: list[str]) -> list[Key]:
    """Keys without limits, named by their place: `api-key-1`, ..."""
    keys = enumerate(given, start=1)
    return [Key(f"api-key-{place}", (digest(key),)) for place, key in keys]


def read_keys(path: str) -> list[Key]:
    """The keys of a file. ValueError: a sentence with the remedy."""
    content = read_private(path, stat.S_IWOTH, "can be written by other users: chmod o-w")
    try:
        found = load_bounded(_UniqueNames(content))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise ValueError(f"{path}: line {line} is not YAML; {_LINE}") from None
    except yaml.YAMLError:
        raise ValueError(f"{path} is not YAML; {_LINE}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path} names no key; {_LINE}")
    try:
        return [_key(name, entry) for name, entry in found.items()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def joined(keys: list[Key]) -> list[Key]:
    """Return the keys. ValueError: two callers have the same name or the same key."""
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise ValueError(f"two keys are named {key.name!r}; give each its own name")
        names.add(key.name)
        for each in key.digests:
            owner = owners.setdefault(each, key.name)
            if owner != key.name:
                raise ValueError(f"{key.name!r} has the key of {owner!r}; make a key for each")
    return keys


def _key(name: object, entry: object) -> Key:
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.startswith(PREFIX):
        raise ValueError(f"{_shown(name)} is no name: use up to 64 letters, digits, . _ @ -")
    if isinstance(entry, str):
        entry = {"key": entry}
    try:
        read = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        wrong, _, member = str(error).partition(" - at `$.")
        where = f"{name}.{member.rstrip('`')}" if member else name
        wrong = f"{wrong[0].lower()}{wrong[1:]}"
        raise ValueError(f"{where}: {wrong}; {_LINE}, or see docs/access.md") from None
    given = [read.key] if isinstance(read.key, str) else read.key
    hashes = [_HASH.fullmatch(one) for one in given]
    if not hashes or None in hashes:
        raise ValueError(f"{name}: a key is sha256: and 64 hex digits; {_LINE}")
    limits = msgspec.structs.asdict(read)
    del limits["key"]
    if read.requests_per_s is not None:
        limits["request_burst"] = read.request_burst or max(1.0, read.requests_per_s)
    limits["token_burst"] = read.token_burst or read.tokens_per_min
    digests = tuple(bytes.fromhex(one[1]) for one in hashes if one is not None)
    return Key(name, digests, **limits)


def _shown(name: object) -> str:
    """A name for messages; not an invalid one, which may be a key in the wrong place."""
    named = isinstance(name, str) and NAME.fullmatch(name) and not name.startswith(PREFIX)
    return repr(name) if named else "an entry"
