"""What a kubeconfig says of one context: its cluster, its user and its namespace.

The format is kubectl's. Unlike kubectl, this merges no files: the first that exists is read.
Messages name members, never their values, which may be secrets.
"""

from __future__ import annotations

import os
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import yaml

from kvrouter.membership.kubernetes.api import ApiFailed
from kvrouter.options.bounded_yaml import TooMuch, load_bounded
from kvrouter_store.system_errors import reason_of

MAX_BYTES: Final = 1 << 20


class _Extension(msgspec.Struct, frozen=True):
    name: str = ""
    extension: Any = None


class Cluster(msgspec.Struct, rename="kebab", frozen=True):
    """How to reach a server, and whom to trust."""

    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    extensions: list[_Extension] = []


class _Variable(msgspec.Struct, frozen=True):
    name: str
    value: str = ""


class Program(msgspec.Struct, rename="camel", frozen=True):
    """A program that makes credentials."""

    command: str
    api_version: str = ""
    args: list[str] = []
    env: list[_Variable] = []
    provide_cluster_info: bool = False
    interactive_mode: str = ""


class User(msgspec.Struct, rename="kebab", frozen=True):
    """What to show a server."""

    token: str = ""
    token_file: str = msgspec.field(name="tokenFile", default="")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    password: str = ""
    exec: Program | None = None
    auth_provider: Any = None
    impersonated: Any = msgspec.field(name="as", default=None)


class _Context(msgspec.Struct, frozen=True):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _Entry(msgspec.Struct, frozen=True):
    """Of one of the lists: it has what the list is of."""

    name: str
    cluster: Cluster = Cluster()
    user: User = User()
    context: _Context = _Context()


class _File(msgspec.Struct, rename="kebab", frozen=True):
    current_context: str = ""
    clusters: list[_Entry] = []
    users: list[_Entry] = []
    contexts: list[_Entry] = []


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """One context of a file, with what it refers to."""

    folder: Path  # of the file; paths in it are relative to that
    namespace: str
    cluster: Cluster
    user: User
    authorities: bytes  # the CAs as PEM; b"": those that this machine trusts

    @property
    def tls(self) -> bool:
        """Whether the server is asked with TLS. Without, it is shown no credentials."""
        return urlsplit(self.cluster.server).scheme == "https"


def first_that_exists(paths: str) -> Path:
    """The kubeconfig among paths with colons in between; ApiFailed: there is none."""
    for path in filter(None, paths.split(os.pathsep)):
        if os.path.exists(path):
            return Path(path)
    raise ApiFailed(f"no kubeconfig {paths}; give KUBECONFIG, or run the router in a Pod")


def read_kubeconfig(path: Path, context: str | None) -> Kubeconfig:
    """What the file says of `context`, None: of its current one; ApiFailed: it cannot be used."""
    file = _parsed(path)
    name = context or file.current_context
    if not name:
        raise ApiFailed("it has no current-context; say context=NAME in the URL")
    said = _entry("context", name, file.contexts).context
    cluster = _entry("cluster", said.cluster, file.clusters).cluster
    user = _entry("user", said.user, file.users).user
    if not _is_url(cluster.server, password=False):
        raise ApiFailed("server of its cluster: write https://HOST:PORT")
    if cluster.proxy_url and not _is_url(cluster.proxy_url, password=True):
        raise ApiFailed("proxy-url of its cluster: write http://HOST:PORT")
    data, file_name = cluster.certificate_authority_data, cluster.certificate_authority
    authorities = content_of("certificate-authority", data, path.parent, file_name)
    return Kubeconfig(path.parent, said.namespace or "default", cluster, user, authorities)


def content_of(name: str, data: str, folder: Path, path: str) -> bytes:
    """What base64 `data`, else a file holds; b"": there is neither. ApiFailed: see there."""
    try:
        if data:
            return b64decode(data)
    except ValueError:
        raise ApiFailed(f"{name}-data is not base64") from None
    return read_file(folder / path, f"{name} {path}") if path else b""


def read_file(path: Path, name: str) -> bytes:
    """The content of a file; ApiFailed: it cannot be read, or is too long."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ApiFailed(f"{name}: {reason_of(error)}; give a readable file") from None
    if len(content) > MAX_BYTES:
        raise ApiFailed(f"{name}: more than {MAX_BYTES} bytes; give a smaller file")
    return content


def _parsed(path: Path) -> _File:
    content = read_file(path, "it cannot be read")
    try:
        value = load_bounded(yaml.SafeLoader(content.decode("utf-8")))
        return msgspec.convert(_without_nulls(value), _File)
    except (TooMuch, msgspec.ValidationError) as error:  # which name places, not values
        raise ApiFailed(str(error)) from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML raises of these kinds for values that do not fit their tags.
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise ApiFailed(f"it is not YAML{line}") from None


def _without_nulls(value: Any) -> Any:
    """The document as if what is null were left out: to kubectl it is the same."""
    if isinstance(value, dict):
        return {str(key): _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _entry(kind: str, name: str, among: list[_Entry]) -> _Entry:
    for each in among:
        if each.name == name:
            return each
    raise ApiFailed(f"it has no {kind} {name!r}")


def _is_url(text: str, *, password: bool) -> bool:
    """Whether it is a URL of HTTP; with a password only where one may be."""
    try:
        parts = urlsplit(text)
        whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment) and (password or "@" not in parts.netloc)
    return parts.scheme in ("http", "https") and whole and plain
