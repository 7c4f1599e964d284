"""Makes single parts of a router from its settings; `app` puts them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.admission import Admission
from kvrouter.entrance import Entrance
from kvrouter.tenants import Tenants
from kvstore.aio import AsyncStoreClient

if TYPE_CHECKING:
    from kvrouter.config import RouterSettings
    from kvrouter.metrics import Metrics

STORE_DEADLINE_S: Final = 2.0
"""A store that does not answer for so long is given up, until it can be connected again."""


def store_client(settings: RouterSettings) -> AsyncStoreClient | None:
    """A client of the store, not started; None where there is none."""
    if settings.store is None:
        return None
    return AsyncStoreClient(
        settings.store,
        name="router",
        token=settings.store_token.get_secret_value(),
        tls=settings.store_tls,
        deadline_s=STORE_DEADLINE_S,
    )


def entrance(settings: RouterSettings, metrics: Metrics) -> Entrance:
    """Where requests begin, or wait for their turn."""
    admission = Admission(settings.max_concurrent_requests, settings.queue_size)
    tenants = Tenants(settings.tenant_header, settings.proxy_networks)
    return Entrance(admission, settings.queue_timeout_s, tenants, metrics)
