"""Settings that SIGHUP changes while requests are under way: which, and where each one lives."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from kvrouter.access.setup import AccessKeys
from kvrouter.admission.settings import networks
from kvrouter.options.complaints import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.app.app import App
    from kvrouter.app.settings import RouterSettings

KEYS: Final = (
    "api_key",
    "api_key_file",
    "worker_api_key",
    "worker_api_key_file",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
)
"""Read again whether they changed or not: what stands in their files may have."""

log = logging.getLogger(__name__)

ENGINES: Final = (
    "prefill",
    "decode",
    "prefiller_hosts",
    "prefiller_ports",
    "decoder_hosts",
    "decoder_ports",
)


class Reload:
    """Reads the settings again on SIGHUP, in a thread, and has the router follow them.

    Signals that come while they are read make one more reading after it.

    Args:
        app: the router; it runs.
        reread: loads the settings; raises UsageError where they cannot be used.
    """

    def __init__(self, app: App, reread: Callable[[], RouterSettings]) -> None:
        self._app = app
        self._reread = reread
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Read the settings again soon."""
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="reload")

    async def close(self) -> None:
        """Stop; a reading that is under way changes nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                settings, keys = await asyncio.to_thread(self._read)
            except (UsageError, ValueError) as error:
                log.error("SIGHUP: everything stays as it is: %s", error)
            else:
                follow(self._app, settings, keys)

    def _read(self) -> tuple[RouterSettings, AccessKeys]:
        settings = self._reread()
        return settings, AccessKeys.read(settings)


def follow(app: App, after: RouterSettings, keys: AccessKeys | None = None) -> None:
    """Take over of `after` what can be; what else changed is logged, and waits for a restart.

    No request notices: limits that sink hold for those who come, times for what begins.

    Args:
        app: the router; it runs.
        after: its settings from now on.
        keys: of `after`; None: they are read now.
    """
    before, app.settings = app.settings, after
    app.access.follow(after, keys)
    if app.ports is not None:
        app.ports.follow(after)
    app.flags.set(after.engines)
    changed = [
        name
        for name in type(after).model_fields
        if name not in (*ENGINES, *KEYS) and getattr(before, name) != getattr(after, name)
    ]
    for name in changed:
        if name in RELOADED:
            log.info("--%s is now %s", name.replace("_", "-"), getattr(after, name))
            RELOADED[name](app, getattr(after, name))
    later = [name for name in changed if name not in RELOADED]
    if later:
        flags = ", ".join("--" + name.replace("_", "-") for name in later)
        log.warning("%s: changed, but takes effect at the next start only", flags)


def _concurrent_requests(app: App, value: int) -> None:
    app.queue_wait.resize(limit=value)


def _queue_size(app: App, value: int) -> None:
    app.queue_wait.resize(queue_size=value)
    app.engine_wait.size = value


def _queue_timeout(app: App, value: float) -> None:
    app.queue_wait.timeout_s = value


def _tenant_header(app: App, value: str) -> None:
    app.queue_wait.tenants.follow(header=value)


def _trusted_proxies(app: App, value: list[str]) -> None:
    app.queue_wait.tenants.follow(proxies=networks(value))


def _engine_wait(app: App, value: float) -> None:
    app.engine_wait.timeout_s = value


def _model_retention(app: App, value: float) -> None:
    app.models.keep_s = value


def _budget(app: App, value: int) -> None:
    app.budget.limit_tokens = value


def _prefill_threshold(app: App, value: int) -> None:
    assert app.inputs_builder is not None
    app.inputs_builder.prefill_threshold = value


def _landing_timeout(app: App, value: float) -> None:
    assert app.landing_waiter is not None
    app.landing_waiter.timeout_s = value


def _max_choices(app: App, value: int) -> None:
    assert app.completions is not None
    app.completions.max_choices = value


def _health_interval(app: App, value: float) -> None:
    app.prober.interval_s = value


def _health_timeout(app: App, value: float) -> None:
    app.prober.client.timeout_s = value


def _at_the_end(app: App, value: float) -> None:
    """`App.settings` tells it when the router stops."""
    del app, value


def _log_level(app: App, value: str) -> None:
    del app
    logging.getLogger().setLevel(value.upper())


RELOADED: Final[Mapping[str, Callable[[App, Any], None]]] = {
    "max_concurrent_requests": _concurrent_requests,
    "queue_size": _queue_size,
    "queue_timeout_s": _queue_timeout,
    "tenant_header": _tenant_header,
    "trusted_proxies": _trusted_proxies,
    "engine_wait_s": _engine_wait,
    "model_retention_s": _model_retention,
    "recompute_budget_tokens": _budget,
    "prefill_threshold": _prefill_threshold,
    "landing_timeout_s": _landing_timeout,
    "max_choices": _max_choices,
    "health_interval_s": _health_interval,
    "health_timeout_s": _health_timeout,
    "drain_delay_s": _at_the_end,
    "drain_timeout_s": _at_the_end,
    "log_level": _log_level,
}
