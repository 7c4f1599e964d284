"""`kvrouter store` for slow machines: its tiers may take longer than --tier-timeout allows."""

import sys

from kvrouter.app import store_node
from kvrouter.cli.main import main
from kvrouter_store.node.settings import StoreSettings

TIER_TIMEOUT_S = 30.0
serve = store_node.run


def patient(settings: StoreSettings) -> int:
    """Serve with that patience."""
    return serve(settings.model_copy(update={"tier_timeout": TIER_TIMEOUT_S}))


if __name__ == "__main__":
    store_node.run = patient  # type: ignore[assignment]
    sys.exit(main(["store", *sys.argv[1:]]))
