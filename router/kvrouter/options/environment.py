"""Reads settings from the environment, without the variables that Kubernetes adds.

For a Service `kvrouter-decode` every Pod of the namespace gets `KVROUTER_DECODE_PORT`,
`KVROUTER_DECODE_SERVICE_HOST`, `KVROUTER_DECODE_PORT_8000_TCP_ADDR` and others
(kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic_settings import BaseSettings, EnvSettingsSource

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d{1,5}")
_URL_NAME: Final = re.compile(r"\w+_PORT(_\d{1,5}_(TCP|UDP|SCTP))?")
_PART_NAME: Final = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d{1,5}_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR))"
)


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment sets.

    Attributes:
        values: by the setting's name.
        variables: names with the model's prefix, in capitals, whether they are settings or not.
        advice: a sentence about variables of Kubernetes, if there are any.
    """

    values: Mapping[str, Any]
    variables: Collection[str]
    advice: tuple[str, ...] = ()


def read_environment(model: type[BaseSettings]) -> Environment:
    """The variables whose names begin with the prefix of `model`."""
    source = EnvSettingsSource(model)
    prefix = source.env_prefix.lower()
    ours = {name: value for name, value in source.env_vars.items() if name.startswith(prefix)}
    links = sorted(name for name, value in ours.items() if _is_service_link(name, value or ""))
    source.env_vars = {name: ours[name] for name in ours.keys() - set(links)}
    return Environment(source(), [name.upper() for name in source.env_vars], _advice(links))


def _advice(links: list[str]) -> tuple[str, ...]:
    if not links:
        return ()
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return (
        f"environment: {links[0].upper()}{more} ignored: Kubernetes sets them for a Service of "
        "that name; enableServiceLinks: false in the Pod leaves them out",
    )


def _is_service_link(name: str, value: str) -> bool:
    if _PART_NAME.fullmatch(name.upper()):
        return True
    return bool(_URL_NAME.fullmatch(name.upper()) and _URL.fullmatch(value))
