"""Which tiers there are: one line for each scheme of --tier."""

from collections.abc import Callable, Mapping
from typing import Final

from kvrouter_store.tiers.base import Tier, TierRefused
from kvrouter_store.tiers.infinistore import InfiniStoreTier
from kvrouter_store.tiers.isolated import Isolated
from kvrouter_store.tiers.mooncake import MooncakeTier
from kvrouter_store.tiers.redis import RedisTier

SCHEMES: Final[Mapping[str, Callable[[str], Tier]]] = {
    "redis": RedisTier,
    "rediss": RedisTier,
    "redis+cluster": RedisTier,
    "rediss+cluster": RedisTier,
    "valkey": RedisTier,
    "valkeys": RedisTier,
    "valkey+cluster": RedisTier,
    "valkeys+cluster": RedisTier,
    "mooncake": MooncakeTier,
    "infinistore": InfiniStoreTier,
}
NATIVE: Final = frozenset({MooncakeTier, InfiniStoreTier})
"""Those whose client is native code: each gets a process of its own."""


def open_tier(url: str) -> Tier:
    """The tier of a URL, which a node may use; not started. Raises TierRefused."""
    tier = tier_of(url)
    return Isolated(url) if type(tier) in NATIVE else tier


def tier_of(url: str) -> Tier:
    """The tier of a URL, in this process; not started. Raises TierRefused."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise TierRefused(
            f"--tier {scheme!r} is no tier that this node knows; its URL begins with "
            f"{', '.join(f'{each}://' for each in SCHEMES)}"
        )
    return SCHEMES[scheme](url)
