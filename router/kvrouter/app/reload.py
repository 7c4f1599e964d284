"""Settings that SIGHUP changes while requests are in flight, and the parts that they reach."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.access.setup import AccessKeys
from kvrouter.app.core import limits_of
from kvrouter.options.complaints import UsageError
from kvrouter.options.option import flag_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.app.build import App
    from kvrouter.app.settings import RouterSettings

KEYS: Final = (
    "api_key",
    "api_key_file",
    "worker_api_key",
    "worker_api_key_file",
    "engine_cert_file",
    "engine_key_file",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
)
"""Read again whether they changed or not: the contents of their files may have."""
ENGINES: Final = ("prefill", "decode")
RELOADED: Final = frozenset(
    {
        "max_concurrent_requests",
        "queue_size",
        "queue_timeout_s",
        "tenant_header",
        "trusted_proxies",
        "engine_wait_s",
        "model_alias",
        "model_max_concurrent_requests",
        "model_prefill_threshold",
        "model_retention_s",
        "recompute_budget_tokens",
        "prefill_threshold",
        "max_predicted_ttft_s",
        "landing_timeout_s",
        "store",
        "max_choices",
        "health_interval_s",
        "health_timeout_s",
        "health_failure_threshold",
        "engine_stall_timeout_s",
        "request_timeout_s",
        "stream_idle_timeout_s",
        "sse_keep_alive_interval_s",
        "connect_timeout_s",
        "retry_max_attempts",
        "cb_failure_threshold",
        "cb_timeout_s",
        "cb_max_timeout_s",
        "drain_delay_s",  # the settings are asked for it when the router stops
        "drain_timeout_s",  # the same
        "admin_token",
        "admin_token_file",
        "log_level",
    }
)
"""What `follow` takes over besides KEYS and ENGINES; the rest needs a restart."""

log = logging.getLogger(__name__)


def follow(app: App, after: RouterSettings, keys: AccessKeys | None = None) -> None:
    """Take over what can change in a running router; log what needs a restart.

    Requests in flight do not notice: a lower limit holds for later requests, a time for what begins
    later.

    Args:
        app: the router.
        after: the settings from now on.
        keys: of `after`; None: they are read now.
    """
    before, app.settings = app.settings, after
    app.core.access.follow(after, keys)
    app.ports.follow(after)
    app.members.flags.set(after.members)
    _follow_limits(app, after)
    if after.log_level != before.log_level:
        logging.getLogger().setLevel(after.log_level.upper())
    changed = [
        name
        for name in type(after).model_fields
        if name not in (*ENGINES, *KEYS) and getattr(before, name) != getattr(after, name)
    ]
    # A router that began without a store, or is to have none, keeps what it has.
    now = RELOADED if app.core.nodes and after.has_nodes else RELOADED - {"store"}
    for name in changed:
        if name in now:
            log.info("%s is now %s", flag_of(name), getattr(after, name))
    if later := [flag_of(name) for name in changed if name not in now]:
        log.warning("%s: changed, but takes effect at the next start only", ", ".join(later))
    if app.events is not None:
        app.events.reloaded([flag_of(name) for name in changed])


def _follow_limits(app: App, after: RouterSettings) -> None:
    """Give the parts what RELOADED names; what is as it was changes nothing."""
    core, prober = app.core, app.members.prober
    breakers = core.pool.breaker_limits
    core.client.deadlines = after.deadlines
    core.keep_alive.interval_s = after.sse_keep_alive_interval_s
    core.admin_token.value = after.admin_token.get_secret_value()
    core.queue_wait.resize(after.max_concurrent_requests, after.queue_size)
    core.queue_wait.timeout_s = after.queue_timeout_s
    core.queue_wait.tenants.follow(after.tenant_header, after.proxy_networks)
    core.gates.follow(after.model_limits)
    core.engine_wait.size, core.engine_wait.timeout_s = after.queue_size, after.engine_wait_s
    core.models.aliases, core.models.keep_s = after.aliases, after.model_retention_s
    core.budget.limit_tokens = after.recompute_budget_tokens
    core.limits.follow(limits_of(after))
    breakers.threshold = after.cb_failure_threshold
    breakers.cooldown_s, breakers.max_cooldown_s = after.cb_timeout_s, after.cb_max_timeout_s
    prober.interval_s, prober.client.timeout_s = after.health_interval_s, after.health_timeout_s
    prober.lives.limits.follow(after.life_limits)


@dataclass(eq=False)
class Reload:
    """Reads the settings again on SIGHUP, in a thread, and has the router follow them.

    Signals that come while they are read make one more reading after it.
    """

    app: App
    reread: Callable[[], RouterSettings]  # raises UsageError if the settings cannot be used
    _wanted: bool = field(default=False, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def begin(self) -> None:
        """Read the settings again soon."""
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="reload")

    async def close(self) -> None:
        """Stop; a reading that runs changes nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                settings, keys = await asyncio.to_thread(self._read)
            except (UsageError, ValueError) as error:
                log.error("SIGHUP: the router keeps its settings: %s", error)
                if self.app.events is not None:
                    self.app.events.reload_refused()
            else:
                follow(self.app, settings, keys)

    def _read(self) -> tuple[RouterSettings, AccessKeys]:
        settings = self.reread()
        return settings, AccessKeys.read(settings)
