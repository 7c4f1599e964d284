"""Settings that SIGHUP changes while requests are in flight, and the parts that they reach."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.access.setup import AccessKeys
from kvrouter.app.core import limits_of
from kvrouter.options.complaints import UsageError
from kvrouter.options.option import flag_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.access.ports import Ports
    from kvrouter.app.core import Core
    from kvrouter.app.members import Members
    from kvrouter.app.settings import RouterSettings
    from kvrouter.control.page.events import Events

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
"""What `LiveSettings` takes over besides KEYS and ENGINES; the rest needs a restart."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveSettings:
    """The settings of a router that runs.

    Attributes:
        core, members, ports: follow a change.
        now: the settings as they are now.
    """

    now: RouterSettings
    core: Core
    members: Members
    ports: Ports
    events: Events | None  # where changes are noted; None: nowhere

    def follow(self, after: RouterSettings, keys: AccessKeys | None = None) -> None:
        """Take over what can change in a running router; log what needs a restart.

        Requests in flight do not notice: a lower limit holds for later requests, a time for what
        begins later.

        Args:
            after: the settings from now on.
            keys: of `after`; None: they are read now.
        """
        before, self.now = self.now, after
        self.core.access.follow(after, keys)
        self.ports.follow(after)
        self.members.flags.set(after.members)
        self._follow_limits(after)
        if after.log_level != before.log_level:
            logging.getLogger().setLevel(after.log_level.upper())
        changed = [
            name
            for name in type(after).model_fields
            if name not in (*ENGINES, *KEYS) and getattr(before, name) != getattr(after, name)
        ]
        for name in changed:
            if name in RELOADED and not self._stays(name):
                log.info("%s is now %s", flag_of(name), getattr(after, name))
        later = [name for name in changed if name not in RELOADED or self._stays(name)]
        if later:
            flags = ", ".join(map(flag_of, later))
            log.warning("%s: changed, but takes effect at the next start only", flags)
        if self.events is not None:
            self.events.reloaded([flag_of(name) for name in changed])

    def _stays(self, name: str) -> bool:
        """Whether it is `store`, and the router began without a store or is to have none."""
        return name == "store" and not (self.core.nodes and self.now.has_nodes)

    def _follow_limits(self, after: RouterSettings) -> None:
        """Give the parts what RELOADED names; what is as it was changes nothing."""
        core, prober = self.core, self.members.prober
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

    def refuse(self, problem: str) -> None:
        """New settings could not be used: the router keeps those that it has."""
        log.error("SIGHUP: the router keeps its settings: %s", problem)
        if self.events is not None:
            self.events.reload_refused()


@dataclass(eq=False)
class Reload:
    """Reads the settings again on SIGHUP, in a thread, and has the router follow them.

    Signals that come while they are read make one more reading after it.

    Attributes:
        reread: loads the settings; raises UsageError if they cannot be used.
    """

    live: LiveSettings  # follows the new settings
    reread: Callable[[], RouterSettings]

    def __post_init__(self) -> None:
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

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
                self.live.refuse(str(error))
            else:
                self.live.follow(settings, keys)

    def _read(self) -> tuple[RouterSettings, AccessKeys]:
        settings = self.reread()
        return settings, AccessKeys.read(settings)
