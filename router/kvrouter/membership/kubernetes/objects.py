"""Objects of the Kubernetes API, as far as discovery reads them: JSON in, structs out."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Metadata(msgspec.Struct, rename="camel", frozen=True):
    """What every object has."""

    name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    resource_version: str = ""


class NamedPort(msgspec.Struct, rename="camel", frozen=True):
    """A port of a container (`container_port`) or of an EndpointSlice (`port`)."""

    name: str | None = None
    container_port: int | None = None
    port: int | None = None


class _Container(msgspec.Struct, frozen=True):
    ports: list[NamedPort] | None = None


class _PodSpec(msgspec.Struct, rename="camel", frozen=True):
    containers: list[_Container] = []
    node_name: str = ""


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    ip: str = msgspec.field(name="podIP", default="")
    conditions: list[_Condition] | None = None


class Pod(msgspec.Struct, frozen=True):
    """A Pod."""

    metadata: Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def serves(self) -> bool:
        """Whether it runs, is Ready and is not to end."""
        ready = any(c.type == "Ready" and c.status == "True" for c in self.status.conditions or ())
        return ready and self.status.phase == "Running" and not self.metadata.deletion_timestamp

    @property
    def ports(self) -> list[NamedPort]:
        """Those of its containers, in their order."""
        return [port for container in self.spec.containers for port in container.ports or ()]


class _EndpointConditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str = ""


class Endpoint(msgspec.Struct, rename="camel", frozen=True):
    """One endpoint of a slice."""

    addresses: list[str] = []
    conditions: _EndpointConditions = _EndpointConditions()
    target_ref: _Target | None = None
    node_name: str = ""

    @property
    def serves(self) -> bool:
        """Whether it is Ready and is not to end; what is not said is well.

        `serving` tells it too where the Service publishes addresses that are not ready.
        """
        said = self.conditions
        return said.ready is not False and said.serving is not False and not said.terminating


class EndpointSlice(msgspec.Struct, rename="camel", frozen=True):
    """Some endpoints of a Service, all of one kind of address."""

    metadata: Metadata
    address_type: str = ""
    endpoints: list[Endpoint] | None = None
    ports: list[NamedPort] | None = None


class _ListMetadata(msgspec.Struct, rename="camel", frozen=True):
    resource_version: str = ""
    more: str = msgspec.field(name="continue", default="")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A page of a list."""

    metadata: _ListMetadata
    items: list[T] | None = None


class Event(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Bookmark(msgspec.Struct, frozen=True):
    """The object of a BOOKMARK: only how far the watch has come."""

    metadata: Metadata


class Status(msgspec.Struct, frozen=True):
    """What went wrong: the object of an ERROR, and the body of an answer that is no 200."""

    code: int = 0
    message: str = ""
