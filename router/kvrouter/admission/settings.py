"""Settings of the queue: its limits, and its tenants."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from kvrouter.admission.tenants import FORWARDED_FOR
from kvrouter.options.types import Texts  # noqa: TC001 (pydantic reads it)


def networks(given: list[str]) -> list[IPv4Network | IPv6Network]:
    """The networks, each written as CIDR or as one address.

    ValueError: one is neither; a sentence with the remedy.
    """
    found = []
    for text in given:
        try:
            found.append(ip_network(text, strict=False))
        except ValueError:
            raise ValueError(
                f"{text!r} is no network: give it as ADDRESS/BITS, as 10.0.0.0/8, or as ADDRESS"
            ) from None
    return found


class AdmissionSettings(BaseModel):
    """How many requests run and wait, and how the queue finds the tenant of a request."""

    max_concurrent_requests: int = Field(
        default=4096,
        ge=1,
        description="Requests in flight at a time; further requests wait in the queue.",
        json_schema_extra={"section": "Limits and time-outs"},
    )
    queue_size: int = Field(
        default=100,
        ge=0,
        description="Requests that may wait for others to end, and as many again that may wait "
        "for a decode engine. Further requests are answered 429 (503 for lack of an engine) with "
        "Retry-After.",
    )
    queue_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest wait in the queue; then a request is answered 503.",
        json_schema_extra={"flags": ["--queue-timeout-secs"]},
    )
    engine_wait_s: float = Field(
        default=10.0,
        ge=0,
        description="Longest wait for a decode engine while none is available, for example while "
        "engines restart; then a request is answered 503.",
    )
    tenant_header: Annotated[str, AfterValidator(lambda name: name.strip().lower())] = Field(
        default=FORWARDED_FOR,
        description="Header by which --trusted-proxies name the tenant of a request. The queue is "
        "fair between tenants. For any other client, and without the header, the client's "
        "address is the tenant.",
        json_schema_extra={"metavar": "HEADER"},
    )
    trusted_proxies: Annotated[
        Texts, AfterValidator(lambda given: [str(each) for each in networks(given)])
    ] = Field(
        default_factory=list,
        description="Addresses of the proxies in front of the router, as CIDR. The router "
        "believes --tenant-header and X-Forwarded-For from these alone.",
        json_schema_extra={"metavar": "NETWORK"},
    )

    @property
    def proxy_networks(self) -> list[IPv4Network | IPv6Network]:
        """The networks of `trusted_proxies`."""
        return networks(self.trusted_proxies)
