"""Service discovery: engines from flags, a file, DNS, Redis or Kubernetes, behind one interface.

`base` is the interface, `merge` combines what all sources name, `follow` runs them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.dns import DnsSource
from kvrouter.membership.discovery.file import FileSource
from kvrouter.membership.discovery.kubernetes import KubernetesSource
from kvrouter.membership.discovery.redis import RedisSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.membership.discovery.base import EngineSource

SOURCES: Final[Mapping[str, Callable[[str, SourceContext], EngineSource]]] = MappingProxyType(
    {
        "file": lambda text, _: FileSource(text),
        "dns": lambda text, _: DnsSource(text),
        "srv": lambda text, _: DnsSource(text),
        "redis": RedisSource,
        "k8s": KubernetesSource,
    }
)
"""Every kind of source by the scheme of its URL; a new one is one line here."""


def make_source(text: str, context: SourceContext | None = None) -> EngineSource:
    """The source that `--discovery TEXT` names, a URL or the path of a file; reads nothing yet.

    ValueError: it names none, or this installation lacks its package; with the remedy.
    """
    scheme = text.partition(":")[0] if "://" in text or text in SOURCES else "file"
    if scheme not in SOURCES:
        raise ValueError(
            f"no discovery by {scheme}://: give a file's path, `redis`, or one of dns://, srv://, "
            "k8s://"
        )
    return SOURCES[scheme](text, context or SourceContext())
