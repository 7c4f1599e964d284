from kvrouter.app.core import STORE_DEADLINE_S
from kvrouter_store.node.settings import StoreSettings


def test_a_node_that_waits_for_its_tiers_is_not_taken_as_away() -> None:
    assert StoreSettings().tier_timeout < STORE_DEADLINE_S
