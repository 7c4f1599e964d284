"""Routing policies: which engines take the legs of a request."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvrouter.routing.policies.least_tokens import LeastTokens
from kvrouter.routing.policies.prefix import Prefix
from kvrouter.routing.policies.round_robin import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.routing.policies.base import Policy

POLICIES: Final[Mapping[str, type[Policy]]] = MappingProxyType(
    {
        RoundRobin.name: RoundRobin,
        LeastTokens.name: LeastTokens,
        Prefix.name: Prefix,
    }
)
"""Every policy by its name; a new one is one line here."""


def make_policy(name: str) -> Policy:
    """The policy of that name, fresh.

    Raises:
        KeyError: no such policy.
    """
    return POLICIES[name]()
