"""Reads settings from the environment, without the variables that Kubernetes adds.

For a Service `kvrouter-decode` every Pod of the namespace gets `KVROUTER_DECODE_PORT`,
`KVROUTER_DECODE_SERVICE_HOST`, `KVROUTER_DECODE_PORT_8000_TCP_ADDR` and others
(kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d{1,5}")
_URL_NAME: Final = re.compile(r"\w+_PORT(_\d{1,5}_(TCP|UDP|SCTP))?")
_PART_NAME: Final = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d{1,5}_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR))"
)


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment sets.

    Attributes:
        variables: values by name, in capitals.
        advice: a sentence about variables of Kubernetes, if there are any.
    """

    variables: Mapping[str, str]
    advice: tuple[str, ...] = ()


def read_environment(prefix: str) -> Environment:
    """The variables whose names begin with `prefix`."""
    found = {name.upper(): value for name, value in os.environ.items()}
    ours = {name: value for name, value in found.items() if name.startswith(prefix)}
    links = sorted(name for name, value in ours.items() if _is_service_link(name, value))
    if not links:
        return Environment(ours)
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    advice = (
        f"environment: {links[0]}{more} ignored: Kubernetes sets them for a Service of that name; "
        "enableServiceLinks: false in the Pod leaves them out"
    )
    return Environment({name: ours[name] for name in ours.keys() - set(links)}, (advice,))


def _is_service_link(name: str, value: str) -> bool:
    if _PART_NAME.fullmatch(name):
        return True
    return bool(_URL_NAME.fullmatch(name) and _URL.fullmatch(value))
