"""Routing policies: which engines take the legs of a request."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from kvrouter.routing.policies.least_tokens import LeastTokens
from kvrouter.routing.policies.planner import Planner
from kvrouter.routing.policies.prefix import Prefix
from kvrouter.routing.policies.round_robin import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.routing.policies.base import Policy

POLICIES: Final[Mapping[str, type[Policy]]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            RoundRobin,
            LeastTokens,
            Prefix,
            Planner,
        )
    }
)
"""Every policy by its name. A new one is a file and a word here (docs/extend.md)."""

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
"""Values of `--policy`."""


def make_policy(name: str) -> Policy:
    """A new policy of that name; KeyError: there is none."""
    return POLICIES[name]()
