"""Which engines an object names, and with what role: pure functions over `objects`.

What is wanted says the URL of a source, `k8s://NAMESPACE?selector=LABELS`, and its options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from kvrouter.engines.engine import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrouter.membership.kubernetes.objects import EndpointSlice, Metadata, NamedPort, Pod

ROLE_LABEL: Final = "kvrouter/role"
BOOTSTRAP_ANNOTATION: Final = "kvrouter/bootstrap-port"
PORT: Final = ("http", 8000)  # name and number of an engine's port, unless something else is said
NODE_PORT: Final = ("kv", 7400)  # the same of a store node
_SHOWN: Final = 40
_LABEL_CHARACTERS: Final = 63
"""Of an engine's label; a Pod's name may be longer, and its end is what tells Pods apart."""
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
        role=_role_of(text, options.get("role")),
        port=_port_of(text, options.get("port")),
        context=options.get("context"),
        name=f"k8s://{parts.netloc}?" + "&".join(f"{n}={v}" for n, v in sorted(options.items())),
    )


def _role_of(text: str, value: str | None) -> Role | None:
    try:
        return Role(value) if value is not None else None
    except ValueError:
        raise _wrong(text, f"say role={' or role='.join(Role)}") from None


def _port_of(text: str, value: str | None) -> int | str | None:
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


class Odd(ValueError):
    """The object cannot be used as it is; a sentence that says what to correct."""


@dataclass(frozen=True, slots=True)
class Found:
    """An engine that an object names."""

    owner: str  # the Pod, which is one engine even with several addresses; else the address
    address: str  # in the form of `parse_address`; of a store node its URL
    role: Role  # which legs it serves
    bootstrap_port: int | None = None  # that its annotation tells; None: it tells none
    host: str = ""  # the node of Kubernetes on which it runs; "": unknown


@dataclass(frozen=True, slots=True)
class Named:
    """What an object names."""

    engines: tuple[Found, ...] = ()  # those that serve
    kind: str = ""  # the kind of its addresses; "": it is no slice


NOTHING: Final = Named()


def of_pod(pod: Pod, wanted: Wanted) -> Named:
    """The engine of a Pod; none unless it is Ready. Odd: see there."""
    if not pod.serves:
        return NOTHING
    ports = [(each.name, each.container_port) for each in pod.ports]
    role = wanted.role or _role(pod.metadata, Role.DECODE)
    bootstrap_port = _bootstrap_port(pod.metadata.annotations or {})
    made = _found(pod.metadata.name, pod.status.ip, _port(ports, wanted, role), role)
    return Named((replace(made, bootstrap_port=bootstrap_port, host=pod.spec.node_name),))


def of_slice(slice_: EndpointSlice, wanted: Wanted) -> Named:
    """The engines of an EndpointSlice: of each Ready endpoint its first address. Odd: see there.

    Its controller gives it the labels of its Service, not those of Pods, and no annotations.
    """
    if slice_.address_type == "FQDN":
        return NOTHING
    ready = [each for each in slice_.endpoints or () if each.serves and each.addresses]
    if not ready:
        return Named(kind=slice_.address_type)
    role = wanted.role or _role(slice_.metadata, None)
    port = _slice_port(slice_.ports or (), wanted, role)
    pods = [each.target_ref.name if each.target_ref is not None else "" for each in ready]
    found = (
        replace(_found(pod, each.addresses[0], port, role), host=each.node_name)
        for pod, each in zip(pods, ready, strict=True)
    )
    return Named(tuple(found), slice_.address_type)


def one_of_each(named: Iterable[Named]) -> list[Found]:
    """One engine for each owner, by IPv4 where the Service has addresses of both kinds.

    Kubernetes changes slices of the two kinds one after the other, so that the second still has
    what has left the first.
    """
    known = list(named)
    if any(each.kind == "IPv4" for each in known):
        known = [each for each in known if each.kind != "IPv6"]
    chosen: dict[str, Found] = {}
    for found in (found for each in known for found in each.engines):
        if found.address < chosen.setdefault(found.owner, found).address:
            chosen[found.owner] = found
    return list(chosen.values())


def _found(pod: str, ip: str, port: int, role: Role) -> Found:
    try:
        shown = f"[{ip}]" if ip_address(ip).version == 6 else ip
    except ValueError:
        raise Odd(f"{ip!r} is no IP address") from None
    place = f"{shown}:{port}"
    label = pod[-_LABEL_CHARACTERS:].lstrip("-.")
    address = f"{label}={place}" if label else place
    return Found(
        owner=pod or place,
        address=f"kv://{place}" if role is Role.STORE else address,
        role=role,
    )


def _port(ports: Sequence[tuple[str | None, int | None]], wanted: Wanted, role: Role) -> int:
    if isinstance(wanted.port, int):
        return wanted.port
    usual_name, usual = NODE_PORT if role is Role.STORE else PORT
    for name, number in ports:
        if name == (wanted.port or usual_name) and number:
            return number
    if wanted.port is None:
        return usual
    raise Odd(f"it has no port named {wanted.port!r}")


def _slice_port(ports: Sequence[NamedPort], wanted: Wanted, role: Role) -> int:
    """As `_port`; the only port of a Service needs no name."""
    numbers = [(each.name, each.port) for each in ports]
    if wanted.port is None and len(numbers) == 1 and numbers[0][1]:
        return numbers[0][1]
    return _port(numbers, wanted, role)


def _role(metadata: Metadata, default: Role | None) -> Role:
    """What its label says; Pods without one serve whole requests, as engines of --decode do."""
    said = (metadata.labels or {}).get(ROLE_LABEL)
    if said is None:
        if default is None:
            raise Odd(f"say role= in the URL, or give the Service the label {ROLE_LABEL}")
        return default
    try:
        return Role(said)
    except ValueError:
        raise Odd(f"label {ROLE_LABEL}={said}: write {', '.join(Role)}") from None


def _bootstrap_port(annotations: dict[str, str]) -> int | None:
    said = annotations.get(BOOTSTRAP_ANNOTATION)
    if said is None:
        return None
    port = port_number(said)
    if port is None:
        raise Odd(f"annotation {BOOTSTRAP_ANNOTATION}: {said[:_SHOWN]!r} is no port")
    return port
