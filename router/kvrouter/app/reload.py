"""Settings that SIGHUP changes while requests are in flight, and the part that each one reaches."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvrouter.access.setup import AccessKeys
from kvrouter.admission.settings import networks
from kvrouter.engines.aliases import read_aliases
from kvrouter.options.complaints import UsageError
from kvrouter.options.types import by_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import SecretStr

    from kvrouter.access.admin_token import AdminToken
    from kvrouter.access.ports import Ports
    from kvrouter.access.setup import Access
    from kvrouter.admission.model_gates import ModelGates
    from kvrouter.admission.recompute_budget import RecomputeBudget
    from kvrouter.admission.waiting import EngineWait, QueueWait
    from kvrouter.app.settings import RouterSettings
    from kvrouter.control.page.events import Events
    from kvrouter.engines.models import ModelNames
    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.discovery.flags import FlagsSource
    from kvrouter.membership.prober import Prober
    from kvrouter.serving.completions import Completions
    from kvrouter.serving.legs.engine_client import EngineClient
    from kvrouter.serving.legs.inputs import InputsBuilder
    from kvrouter.serving.legs.landing import LandingWaiter
    from kvrouter.serving.legs.retries import Retries

KEYS: Final = (
    "api_key",
    "api_key_file",
    "worker_api_key",
    "worker_api_key_file",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
)
"""Read again whether they changed or not: the contents of their files may have."""
ENGINES: Final = (
    "prefill",
    "decode",
    "prefiller_hosts",
    "prefiller_ports",
    "decoder_hosts",
    "decoder_ports",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustable:
    """The parts of a router that a change of its settings reaches."""

    access: Access
    admin_token: AdminToken
    ports: Ports
    flags: FlagsSource
    queue_wait: QueueWait
    gates: ModelGates
    engine_wait: EngineWait
    models: ModelNames
    budget: RecomputeBudget
    inputs_builder: InputsBuilder
    landing_waiter: LandingWaiter
    completions: Completions
    prober: Prober
    pool: EnginePool
    client: EngineClient
    retries: Retries


class LiveSettings:
    """The settings of a router that runs.

    Args:
        settings: that it was built with.
        parts: follow a change.
        events: where changes are noted; None: nowhere.

    Attributes:
        now: the settings as they are now.
    """

    def __init__(
        self, settings: RouterSettings, parts: Adjustable, events: Events | None = None
    ) -> None:
        self.now = settings
        self._parts = parts
        self._events = events

    def follow(self, after: RouterSettings, keys: AccessKeys | None = None) -> None:
        """Take over what can change in a running router; log what needs a restart.

        Requests in flight do not notice: a lower limit holds for later requests, a time for what
        begins later.

        Args:
            after: the settings from now on.
            keys: of `after`; None: they are read now.
        """
        before, self.now, parts = self.now, after, self._parts
        parts.access.follow(after, keys)
        parts.ports.follow(after)
        parts.flags.set(after.engines)
        parts.client.deadlines = after.deadlines
        changed = [
            name
            for name in type(after).model_fields
            if name not in (*ENGINES, *KEYS) and getattr(before, name) != getattr(after, name)
        ]
        for name in changed:
            if name in RELOADED:
                log.info("%s is now %s", _flag(name), getattr(after, name))
                RELOADED[name](parts, getattr(after, name))
        later = [name for name in changed if name not in RELOADED]
        if later:
            flags = ", ".join(map(_flag, later))
            log.warning("%s: changed, but takes effect at the next start only", flags)
        if self._events is not None:
            self._events.reloaded([_flag(name) for name in changed])

    def refuse(self, problem: str) -> None:
        """New settings could not be used: the router keeps those that it has."""
        log.error("SIGHUP: the router keeps its settings: %s", problem)
        if self._events is not None:
            self._events.reload_refused()


class Reload:
    """Reads the settings again on SIGHUP, in a thread, and has the router follow them.

    Signals that come while they are read make one more reading after it.

    Args:
        live: follows the new settings.
        reread: loads the settings; raises UsageError if they cannot be used.
    """

    def __init__(self, live: LiveSettings, reread: Callable[[], RouterSettings]) -> None:
        self._live = live
        self._reread = reread
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
                self._live.refuse(str(error))
            else:
                self._live.follow(settings, keys)

    def _read(self) -> tuple[RouterSettings, AccessKeys]:
        settings = self._reread()
        return settings, AccessKeys.read(settings)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _queue_size(parts: Adjustable, value: int) -> None:
    parts.queue_wait.resize(queue_size=value)
    parts.gates.copy_settings()
    parts.engine_wait.size = value


def _queue_timeout(parts: Adjustable, value: float) -> None:
    parts.queue_wait.timeout_s = value
    parts.gates.copy_settings()


def _engine_wait(parts: Adjustable, value: float) -> None:
    parts.engine_wait.timeout_s = value


def _model_retention(parts: Adjustable, value: float) -> None:
    parts.models.keep_s = value


def _model_alias(parts: Adjustable, value: list[str]) -> None:
    parts.models.aliases = read_aliases(value)


def _budget(parts: Adjustable, value: int) -> None:
    parts.budget.limit_tokens = value


def _prefill_threshold(parts: Adjustable, value: int) -> None:
    parts.inputs_builder.prefill_threshold = value


def _model_thresholds(parts: Adjustable, value: list[str]) -> None:
    parts.inputs_builder.model_thresholds = by_model(value)


def _landing_timeout(parts: Adjustable, value: float) -> None:
    parts.landing_waiter.timeout_s = value


def _max_choices(parts: Adjustable, value: int) -> None:
    parts.completions.max_choices = value


def _health_interval(parts: Adjustable, value: float) -> None:
    parts.prober.interval_s = value


def _health_timeout(parts: Adjustable, value: float) -> None:
    parts.prober.client.timeout_s = value


def _health_failures(parts: Adjustable, value: int) -> None:
    parts.prober.failed_checks = value


def _retries(parts: Adjustable, value: int) -> None:
    parts.retries.max_attempts = value


def _breaker_threshold(parts: Adjustable, value: int) -> None:
    parts.pool.breaker_limits.threshold = value


def _breaker_cooldown(parts: Adjustable, value: float) -> None:
    parts.pool.breaker_limits.cooldown_s = value


def _breaker_max_cooldown(parts: Adjustable, value: float) -> None:
    parts.pool.breaker_limits.max_cooldown_s = value


def _admin_token(parts: Adjustable, value: SecretStr) -> None:
    parts.admin_token.value = value.get_secret_value()


def _followed(parts: Adjustable, value: object) -> None:
    """`LiveSettings` follows it together with others, or is asked for it when the router stops."""
    del parts, value


RELOADED: Final[Mapping[str, Callable[[Adjustable, Any], None]]] = {
    "max_concurrent_requests": lambda parts, value: parts.queue_wait.resize(limit=value),
    "queue_size": _queue_size,
    "queue_timeout_s": _queue_timeout,
    "tenant_header": lambda parts, value: parts.queue_wait.tenants.follow(header=value),
    "trusted_proxies": lambda parts, value: parts.queue_wait.tenants.follow(
        proxies=networks(value)
    ),
    "engine_wait_s": _engine_wait,
    "model_alias": _model_alias,
    "model_max_concurrent_requests": lambda parts, value: parts.gates.follow(by_model(value)),
    "model_prefill_threshold": _model_thresholds,
    "model_retention_s": _model_retention,
    "recompute_budget_tokens": _budget,
    "prefill_threshold": _prefill_threshold,
    "landing_timeout_s": _landing_timeout,
    "max_choices": _max_choices,
    "health_interval_s": _health_interval,
    "health_timeout_s": _health_timeout,
    "health_failure_threshold": _health_failures,
    "request_timeout_s": _followed,
    "stream_idle_timeout_s": _followed,
    "connect_timeout_s": _followed,
    "retry_max_attempts": _retries,
    "cb_failure_threshold": _breaker_threshold,
    "cb_timeout_s": _breaker_cooldown,
    "cb_max_timeout_s": _breaker_max_cooldown,
    "drain_delay_s": _followed,
    "drain_timeout_s": _followed,
    "admin_token": _admin_token,
    "admin_token_file": _followed,
    "log_level": lambda _, value: logging.getLogger().setLevel(value.upper()),
}
