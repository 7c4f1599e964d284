"""Where engines come from: flags, a watched file, DNS, Redis, behind one seam.

`base` is the seam, `membership` puts together what all sources say, `following` runs them.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvrouter.membership.discovery.base import RedisAccess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.membership.discovery.base import EngineSource

SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "file": "kvrouter.membership.discovery.file:FileSource",
        "dns": "kvrouter.membership.discovery.dns:DnsSource",
        "srv": "kvrouter.membership.discovery.dns:DnsSource",
        "redis": "kvrouter.membership.discovery.redis:RedisSource",
    }
)
"""Every kind of source by the scheme of its URL; a new one is one line here. Imported when used."""


def make_source(text: str, reach: RedisAccess | None = None) -> EngineSource:
    """The source that `--discovery TEXT` names; reads nothing yet.

    Args:
        text: a URL, or the path of a file.
        reach: what of the router's it may use; None where it will not be followed.

    Raises:
        ValueError: it names none, or one that this installation cannot have; with the remedy.
    """
    scheme = text.partition(":")[0] if "://" in text or text in SOURCES else "file"
    if scheme not in SOURCES:
        known = ", ".join(f"{name}://" for name in ("dns", "srv"))
        raise ValueError(
            f"no discovery by {scheme}://: give a file's path, `redis`, or one of {known}"
        )
    module, _, name = SOURCES[scheme].partition(":")
    made: EngineSource = getattr(import_module(module), name)(text, reach or RedisAccess())
    return made
