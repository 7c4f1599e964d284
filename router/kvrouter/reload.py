"""Settings that SIGHUP changes while requests are under way: which, and where each one lives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.app import App
    from kvrouter.config import RouterSettings

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


def follow(app: App, after: RouterSettings) -> None:
    """Take over of `after` what can be; what else changed is logged, and waits for a restart.

    No request notices: limits that sink hold for those who come, times for what begins.
    """
    before, app.settings = app.settings, after
    app.access.follow(after, app.server)
    if app.ports is not None:
        app.ports.follow(after)
    app.flags.say(after.engines)
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
    app.entrance.resize(limit=value)


def _queue_size(app: App, value: int) -> None:
    app.entrance.resize(queue_size=value)
    app.standby.size = value


def _queue_timeout(app: App, value: float) -> None:
    app.entrance.timeout_s = value


def _tenant_header(app: App, value: str) -> None:
    app.entrance.tenant_header = value


def _engine_wait(app: App, value: float) -> None:
    app.standby.timeout_s = value


def _budget(app: App, value: int) -> None:
    app.budget.limit_tokens = value


def _prefill_threshold(app: App, value: int) -> None:
    assert app.survey is not None
    app.survey.prefill_threshold = value


def _landing_timeout(app: App, value: float) -> None:
    assert app.handover is not None
    app.handover.timeout_s = value


def _max_choices(app: App, value: int) -> None:
    assert app.router is not None
    app.router.max_choices = value


def _health_interval(app: App, value: float) -> None:
    app.prober.interval_s = value


def _health_timeout(app: App, value: float) -> None:
    app.prober.timeout_s = value


def _log_level(app: App, value: str) -> None:
    del app
    logging.getLogger().setLevel(value.upper())


RELOADED: Final[Mapping[str, Callable[[App, Any], None]]] = {
    "max_concurrent_requests": _concurrent_requests,
    "queue_size": _queue_size,
    "queue_timeout_s": _queue_timeout,
    "tenant_header": _tenant_header,
    "engine_wait_s": _engine_wait,
    "recompute_budget_tokens": _budget,
    "prefill_threshold": _prefill_threshold,
    "landing_timeout_s": _landing_timeout,
    "max_choices": _max_choices,
    "health_interval_s": _health_interval,
    "health_timeout_s": _health_timeout,
    "log_level": _log_level,
}
