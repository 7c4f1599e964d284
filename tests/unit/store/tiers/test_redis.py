"""URLs of Redis: what the tier relies on cannot be changed by one."""

import pytest

from kvrouter_store.tiers.base import TierRefused
from kvrouter_store.tiers.redis import RedisTier


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "valkey"])
def test_a_url_does_not_choose_the_protocol(scheme: str) -> None:
    with pytest.raises(TierRefused, match="leave out protocol, which is always 2"):
        RedisTier(f"{scheme}://host?protocol=3")
