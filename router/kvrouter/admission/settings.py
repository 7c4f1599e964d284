"""Settings of the tenants between whom the queue is fair, where callers need no key."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network

from pydantic import BaseModel, Field, field_validator

from kvrouter.admission.tenants import FORWARDED_FOR
from kvrouter.options.types import Texts  # noqa: TC001 (pydantic reads it)


def networks(given: list[str]) -> list[IPv4Network | IPv6Network]:
    """The networks that are written as CIDR, or as one address.

    Raises:
        ValueError: one is neither; says how to write it.
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


class TenantSettings(BaseModel):
    """How tenants are told apart whose requests bring no key."""

    tenant_header: str = Field(
        default=FORWARDED_FOR,
        description="Header by which --trusted-proxies name the tenant of a request, between whom "
        "the queue is fair. Of any other client, and without it, the address is the tenant.",
    )
    trusted_proxies: Texts = Field(
        default_factory=list,
        description="Addresses of proxies before the router, as CIDR; repeat it or give a list. "
        "Only their --tenant-header and X-Forwarded-For are believed.",
    )

    @field_validator("tenant_header")
    @classmethod
    def _lower_case(cls, value: str) -> str:
        return value.strip().lower()

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: list[str]) -> list[str]:
        return [str(network) for network in networks(value)]

    @property
    def proxy_networks(self) -> list[IPv4Network | IPv6Network]:
        """The networks of `trusted_proxies`."""
        return networks(self.trusted_proxies)
