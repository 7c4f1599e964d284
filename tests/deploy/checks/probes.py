"""The paths that probes ask, asked of running processes."""

from collections.abc import Iterable
from pathlib import Path

import aiohttp
import yaml
from tests.deploy.checks.manifests import DEPLOY, Overlay

from kvrouter.tools.demo.children import ChildFailed, Children

START = {
    "serve": ("serve", "--port", "0", "--admin"),
    "store": ("store", "--port", "0", "--http-port", "0", "--memory", "16MiB"),
    "sim": ("sim", "--port", "0", "--model", "sim"),
}
Asked = tuple[str, str, str]
"""Who asks, the command that answers, the path."""


def of_overlay(overlay: Overlay) -> set[Asked]:
    """The HTTP probes of kvrouter's own processes."""
    return {
        (container.where, container.spec["args"][0], probe["httpGet"]["path"])
        for container in overlay.containers()
        if container.runs_kvrouter
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if "httpGet" in (probe := container.spec.get(kind, {}))
    }


def of_envoy() -> set[Asked]:
    """The health check of Envoy."""
    clusters = yaml.safe_load((DEPLOY / "envoy.yaml").read_text())["static_resources"]["clusters"]
    checks = [check for each in clusters for check in each["health_checks"]]
    return {("envoy.yaml", "serve", each["http_health_check"]["path"]) for each in checks}


async def complaints(asked: Iterable[Asked], folder: Path) -> list[str]:
    """Paths that the process does not have: it answers them with another status than 200 or 503."""
    found = []
    async with Children(folder) as children, aiohttp.ClientSession() as http:
        try:
            urls = {name: (await children.start(name, *args)).http for name, args in START.items()}
        except ChildFailed as failed:
            return [str(failed)]
        for where, command, path in sorted(asked):
            async with http.get(f"{urls[command]}{path}") as answer:
                if answer.status not in (200, 503):
                    found.append(f"{where}: kvrouter {command} answers {path} {answer.status}")
    return found
