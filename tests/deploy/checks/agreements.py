"""What a process is told against what stands around it: ports, time to drain, memory."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal

from tests.deploy.checks.commands import Loaded, Refused, in_container
from tests.deploy.checks.manifests import Container, Json, Overlay

from kvrouter_store.connectors.settings import ConnectorRefused, ConnectorSettings

TO_END_S = 5
"""Seconds that a process needs after its drain, at most."""
BESIDE_POOL_BYTES = 256 << 20
"""Memory of a store besides its pool."""
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def complaints(overlay: Overlay) -> Iterator[str]:
    for container in overlay.containers():
        if container.runs_kvrouter:
            yield from _of_kvrouter(overlay, container)
        else:
            yield from _of_engine(container)


def _of_kvrouter(overlay: Overlay, container: Container) -> Iterator[str]:
    try:
        with in_container(overlay, container) as found:
            yield from _ports(container, found)
            yield from _addresses(overlay, container, str(found.settings))
            yield from _grace(container, drain_s(found))
            if found.command == "store":
                yield from _memory(container, found.settings.memory)
    except Refused as error:
        yield f"{container.where}: {error}"


def drain_s(found: Loaded) -> float:
    """How long it may take to end after SIGTERM, if all goes well."""
    longest = {"serve": "drain_timeout_s", "store": "drain_timeout"}
    return float(getattr(found.settings, longest[found.command])) if found.command in longest else 0


def _ports(container: Container, found: Loaded) -> Iterator[str]:
    for name in ("port", "http_port", "control_port"):
        port = getattr(found.settings, name, None)
        if port is not None and port not in container.ports.values():
            yield f"{container.where}: {name} {port} is none of its ports"
    config = getattr(found.settings, "kv_events_config", None)
    if config is not None and config.address() is not None:
        yield from _event_ports(container, config.model_dump(exclude_none=True))


def _event_ports(container: Container, events: Json) -> Iterator[str]:
    for name in ("endpoint", "replay_endpoint"):
        if name in events and int(events[name].rsplit(":", 1)[1]) not in container.ports.values():
            yield f"{container.where}: {name} {events[name]} is none of its ports"


def _addresses(overlay: Overlay, container: Container, text: str) -> Iterator[str]:
    """Each store that the text names is a Service of the overlay, at that port."""
    for host, port in re.findall(r"kvs?://([\w.-]+):(\d+)", text):
        services = [each for each in overlay.of("Service") if each["metadata"]["name"] == host]
        if not any(each["port"] == int(port) for s in services for each in s["spec"]["ports"]):
            yield f"{container.where}: no Service {host} with port {port}"


def _grace(container: Container, needed_s: float) -> Iterator[str]:
    hook = container.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    given_s = container.pod.get("terminationGracePeriodSeconds", 30)
    for each in late(given_s, hook.get("seconds", 0) + needed_s):
        yield f"{container.where}: {each}"


def late(given_s: float, drain_s: float) -> Iterator[str]:
    """The complaint if a process is killed before it has drained and ended."""
    if given_s < drain_s + TO_END_S:
        yield f"killed after {given_s:g} s, but may need {drain_s + TO_END_S:g} s to end"


def _memory(container: Container, pool_bytes: int) -> Iterator[str]:
    """The pool is memory of the container: beyond the limit the kernel kills the store."""
    found = re.fullmatch(r"(\d+)(\w*)", container.spec["resources"]["limits"]["memory"])
    limit = Decimal(found[1]) * UNITS[found[2]] if found else 0
    if limit < pool_bytes + BESIDE_POOL_BYTES:
        yield f"{container.where}: a limit of {limit} bytes for a pool of {pool_bytes}"


def _of_engine(container: Container) -> Iterator[str]:
    """vLLM and SGLang are not here: only what kvrouter knows of them."""
    flags = dict(word.split("=", 1) for word in container.expanded if re.match(r"--[\w-]+=", word))
    if int(flags.get("--port", 0)) not in container.ports.values():
        yield f"{container.where}: --port {flags.get('--port')} is none of its ports"
    if container.spec["startupProbe"]["httpGet"]["path"] != "/health":
        yield f"{container.where}: engines serve /health"
    yield from _grace(container, float(flags.get("--shutdown-timeout", 0)))
    try:
        transfer = json.loads(flags.get("--kv-transfer-config", "{}"))
        events = json.loads(flags.get("--kv-events-config", "{}"))
    except ValueError as error:
        yield f"{container.where}: {error}"
        return
    yield from _event_ports(container, events)
    if transfer.get("kv_connector") == "KVStoreConnector":
        try:
            ConnectorSettings.parse(transfer["kv_connector_extra_config"], transfer["kv_role"])
        except ConnectorRefused as error:
            yield f"{container.where}: {error}"
