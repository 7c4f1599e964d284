"""The URL of a source of Kubernetes: `k8s://NAMESPACE?selector=LABELS`, and its options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kvrouter.engines.engine import Role

_OPTIONS: Final = ("selector", "service", "role", "port", "context")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER: Final = re.compile(r"[0-9]{1,5}")
SERVICE_LABEL: Final = "kubernetes.io/service-name"
"""By which the EndpointSlices of a Service are found."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a URL asks for."""

    namespace: str  # "": that of the router's own Pod, or of the kubeconfig's context
    selector: str  # of labels, as `kubectl --selector` takes it
    slices: bool  # whether it selects EndpointSlices, not Pods
    role: Role | None  # of all engines; None: their labels tell
    port: int | str | None  # of all engines, number or name; None: the port named http, else 8000
    context: str | None  # of the kubeconfig; None: its current one, or no kubeconfig
    name: str  # of the source


def read_url(text: str) -> Wanted:
    """What a URL asks for; ValueError: a sentence with the remedy."""
    parts = urlsplit(text)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if unknown := options.keys() - set(_OPTIONS):
        known = ", ".join(_OPTIONS)
        raise _wrong(text, f"no option {min(unknown)!r}; there are {known}")
    if len(options) < len(pairs) or "" in options.values():
        raise _wrong(text, "give each option once, with a value")
    if (parts.netloc and not _NAME.fullmatch(parts.netloc)) or parts.path or parts.fragment:
        raise _wrong(text, "give it as k8s://NAMESPACE?selector=LABELS")
    if ("selector" in options) is ("service" in options):
        raise _wrong(text, "say ?selector=LABELS for Pods, or ?service=NAME for a Service")
    service = options.get("service")
    if service is not None and not _NAME.fullmatch(service):
        raise _wrong(text, f"{service!r} is no name of a Service")
    return Wanted(
        namespace=parts.netloc,
        selector=f"{SERVICE_LABEL}={service}" if service else options["selector"],
        slices=service is not None,
        role=_role(text, options.get("role")),
        port=_port(text, options.get("port")),
        context=options.get("context"),
        name=f"k8s://{parts.netloc}?" + "&".join(f"{n}={v}" for n, v in sorted(options.items())),
    )


def _role(text: str, value: str | None) -> Role | None:
    try:
        return Role(value) if value is not None else None
    except ValueError:
        raise _wrong(text, f"say role={' or role='.join(Role)}") from None


def _port(text: str, value: str | None) -> int | str | None:
    if value is None or (_NAME.fullmatch(value) and not value.isdecimal()):
        return value
    number = port_number(value)
    if number is None:
        raise _wrong(text, f"port={value} is neither a port nor the name of one")
    return number


def port_number(text: str) -> int | None:
    """The port that a text of any length is; None: it is none."""
    number = int(text) if _NUMBER.fullmatch(text) else 0
    return number if 0 < number < 65536 else None


def _wrong(text: str, sentence: str) -> ValueError:
    return ValueError(f"discovery {text!r}: {sentence}")
