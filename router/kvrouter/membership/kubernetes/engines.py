"""Which engines an object names, and with what role: pure functions over `objects`."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrouter.membership.kubernetes.objects import (
        EndpointSlice,
        Metadata,
        NamedPort,
        Pod,
    )
    from kvrouter.membership.kubernetes.options import Wanted

ROLE_LABEL: Final = "kvrouter/role"
BOOTSTRAP_ANNOTATION: Final = "kvrouter/bootstrap-port"
PORT_NAME: Final = "http"
PORT: Final = 8000
_LABEL_CHARACTERS: Final = 63
"""Of an engine's label; a Pod's name may be longer, and its end is what tells Pods apart."""


class Odd(ValueError):
    """The object cannot be used as it is; a sentence that says what to correct."""


@dataclass(frozen=True, slots=True)
class Found:
    """An engine that an object names.

    Attributes:
        owner: the Pod, which is one engine even with several addresses; else the address.
        address: in the form of `parse_address`.
        role: which legs it serves.
        bootstrap_port: that its annotation tells; None: it tells none.
    """

    owner: str
    address: str
    role: Role
    bootstrap_port: int | None = None


def of_pod(pod: Pod, wanted: Wanted) -> tuple[Found, ...]:
    """The engine of a Pod; none unless it is Ready. Odd: see there."""
    if not pod.serves:
        return ()
    ports = [(each.name, each.container_port) for each in pod.ports]
    name, host = pod.metadata.name, pod.status.ip
    return (_found(name, host, _port(ports, wanted), pod.metadata, wanted),)


def of_slice(slice_: EndpointSlice, wanted: Wanted) -> tuple[Found, ...]:
    """The engines of an EndpointSlice: of each Ready endpoint its first address. Odd: see there."""
    ready = [each for each in slice_.endpoints or () if each.serves and each.addresses]
    if not ready or slice_.address_type == "FQDN":
        return ()
    port = _slice_port(slice_.ports or (), wanted)
    pods = [each.target_ref.name if each.target_ref is not None else "" for each in ready]
    return tuple(
        _found(pod, each.addresses[0], port, slice_.metadata, wanted)
        for pod, each in zip(pods, ready, strict=True)
    )


def one_of_each(found: Iterable[Found]) -> list[Found]:
    """One for each owner: of a Pod with addresses of both kinds, in two slices, that of IPv4."""
    chosen: dict[str, Found] = {}
    for each in found:
        known = chosen.setdefault(each.owner, each)
        if _preference(each) < _preference(known):
            chosen[each.owner] = each
    return list(chosen.values())


def _preference(found: Found) -> tuple[bool, str]:
    return "[" in found.address, found.address


def _found(pod: str, host: str, port: int, metadata: Metadata, wanted: Wanted) -> Found:
    try:
        shown = f"[{host}]" if ip_address(host).version == 6 else host
    except ValueError:
        raise Odd(f"{host!r} is no IP address") from None
    place = f"{shown}:{port}"
    label = pod[-_LABEL_CHARACTERS:].lstrip("-.")
    return Found(
        owner=pod or place,
        address=f"{label}={place}" if label else place,
        role=wanted.role or _role(metadata.labels or {}),
        bootstrap_port=_bootstrap_port(metadata.annotations or {}),
    )


def _port(ports: Sequence[tuple[str | None, int | None]], wanted: Wanted) -> int:
    if isinstance(wanted.port, int):
        return wanted.port
    for name, number in ports:
        if name == (wanted.port or PORT_NAME) and number:
            return number
    if wanted.port is None:
        return PORT
    raise Odd(f"it has no port named {wanted.port!r}")


def _slice_port(ports: Sequence[NamedPort], wanted: Wanted) -> int:
    """As `_port`; the only port of a Service needs no name."""
    numbers = [(each.name, each.port) for each in ports]
    if wanted.port is None and len(numbers) == 1 and numbers[0][1]:
        return numbers[0][1]
    return _port(numbers, wanted)


def _role(labels: dict[str, str]) -> Role:
    """What its label says; engines without one serve whole requests, as those of --decode do."""
    said = labels.get(ROLE_LABEL, Role.DECODE.value)
    try:
        return Role(said)
    except ValueError:
        raise Odd(f"label {ROLE_LABEL}={said}: write prefill, decode or both") from None


def _bootstrap_port(annotations: dict[str, str]) -> int | None:
    said = annotations.get(BOOTSTRAP_ANNOTATION)
    if said is None:
        return None
    if said.isdecimal() and 0 < int(said) < 65536:
        return int(said)
    raise Odd(f"annotation {BOOTSTRAP_ANNOTATION}={said}: write a port")
