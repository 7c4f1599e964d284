"""Service discovery: engines from flags, a file, DNS, Redis or Kubernetes, behind one interface.

`base` is the interface; `follow` runs the sources and combines what they name.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.dns import DnsSource
from kvrouter.membership.discovery.file import FileSource
from kvrouter.membership.discovery.kubernetes import KubernetesSource
from kvrouter.membership.discovery.redis import RedisSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.membership.discovery.base import EngineSource


class SourceKind(NamedTuple):
    """How to make a source of one kind, and what the help of `--discovery` says of it."""

    make: Callable[[str, SourceContext], EngineSource]
    summary: str


SOURCES: Final[Mapping[str, SourceKind]] = MappingProxyType(
    {
        "file": SourceKind(
            lambda text, _: FileSource(text),
            "FILE: a YAML file with lists `prefill`, `decode` and `store`, which the router "
            "watches.",
        ),
        "dns": SourceKind(
            lambda text, _: DnsSource(text),
            "dns://NAME:PORT?role=decode: the addresses of a DNS name.",
        ),
        "srv": SourceKind(
            lambda text, _: DnsSource(text),
            "srv://NAME?role=decode: the SRV records of a service.",
        ),
        "redis": SourceKind(
            RedisSource, "redis: the engines that `kvrouter register` keeps in --redis."
        ),
        "k8s": SourceKind(
            KubernetesSource,
            "k8s://NAMESPACE?selector=LABELS: the Ready Pods of Kubernetes with these labels.",
        ),
    }
)
"""Every kind of source by the scheme of its URL. A new one is a file and a line here."""


def make_source(text: str, context: SourceContext | None = None) -> EngineSource:
    """The source that `--discovery TEXT` names, a URL or the path of a file; reads nothing yet.

    ValueError: it names none, or this installation lacks its package; with the remedy.
    """
    scheme = text.partition(":")[0] if "://" in text or text in SOURCES else "file"
    if scheme not in SOURCES:
        raise ValueError(
            f"no discovery by {scheme}://: give a file's path, `redis`, or one of "
            + ", ".join(f"{each}://" for each in SOURCES if each not in {"file", "redis"})
        )
    return SOURCES[scheme].make(text, context or SourceContext())
