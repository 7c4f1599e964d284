"""Makes single parts of a router from its settings; `app` puts them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.admission.tenants import Tenants
from kvrouter.admission.waiting import QueueWait
from kvrouter_store.client.asyncio_client import AsyncStoreClient

if TYPE_CHECKING:
    from kvrouter.app.settings import RouterSettings
    from kvrouter.telemetry.metrics import Metrics

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


def queue_wait(settings: RouterSettings, metrics: Metrics) -> QueueWait:
    """Where requests begin, or wait for their turn."""
    return QueueWait(
        settings.max_concurrent_requests,
        settings.queue_size,
        settings.queue_timeout_s,
        Tenants(settings.tenant_header, settings.proxy_networks),
        metrics,
    )
