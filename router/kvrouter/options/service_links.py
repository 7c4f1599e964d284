"""Variables of the environment that Kubernetes sets for Services, which are no settings.

For a Service `kvrouter-decode` every Pod of the namespace gets `KVROUTER_DECODE_PORT`,
`KVROUTER_DECODE_SERVICE_HOST`, `KVROUTER_DECODE_PORT_8000_TCP_ADDR` and others
(kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d{1,5}")
_URL_NAME: Final = re.compile(r"\w+_PORT(_\d{1,5}_(TCP|UDP|SCTP))?")
_PART_NAME: Final = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d{1,5}_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR))"
)


def service_links(variables: Mapping[str, str | None], prefix: str) -> list[str]:
    """Names of those of `variables`, which begin with `prefix`, that Kubernetes has set."""
    return sorted(
        name
        for name, value in variables.items()
        if name.upper().startswith(prefix) and _is_link(name.upper(), value or "")
    )


def advice(links: list[str]) -> str:
    """A sentence about variables that are ignored."""
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return (
        f"environment: {links[0].upper()}{more} ignored: Kubernetes sets them for a Service of "
        "that name; enableServiceLinks: false in the Pod leaves them out"
    )


def _is_link(name: str, value: str) -> bool:
    if _PART_NAME.fullmatch(name):
        return True
    return bool(_URL_NAME.fullmatch(name) and _URL.fullmatch(value))
