"""Pods and EndpointSlices as the API server would show them, and a kubeconfig for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]
LABELS = {"app": "engine"}


def pod(
    ip: str = "10.0.0.1",
    port: int = 8000,
    *,
    role: str | None = None,
    ready: bool = True,
    leaving: bool = False,
    port_name: str = "http",
    annotations: Mapping[str, str] | None = None,
    host: str = "none",
) -> Json:
    """The parts of a Pod: `ready` is its condition, `leaving` sets its deletionTimestamp."""
    metadata: Json = {"labels": LABELS | ({"kvrouter/role": role} if role else {})}
    if annotations:
        metadata["annotations"] = dict(annotations)
    if leaving:
        metadata |= {"deletionTimestamp": "2025-01-02T00:00:00Z", "deletionGracePeriodSeconds": 30}
    containers = [{"name": "engine", "ports": [{"name": port_name, "containerPort": port}]}]
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": metadata,
        "spec": {"nodeName": host, "containers": containers},
        "status": {"phase": "Running", "podIP": ip, "conditions": conditions},
    }


def endpoint(ip: str, pod: str | None = None, host: str = "none", **conditions: bool) -> Json:
    """One endpoint of a slice."""
    made: Json = {"addresses": [ip], "conditions": {"ready": True, **conditions}}
    made["nodeName"] = host
    if pod:
        made["targetRef"] = {"kind": "Pod", "name": pod, "namespace": "test"}
    return made


def endpoint_slice(
    *endpoints: Json, service: str = "engines", ports: Mapping[str, int] | None = None, **more: Any
) -> Json:
    """The parts of an EndpointSlice of a Service."""
    labels = {"kubernetes.io/service-name": service} | more.pop("labels", {})
    named = {"http": 8000} if ports is None else ports
    return {
        "metadata": {"labels": labels},
        "addressType": more.pop("address_type", "IPv4"),
        "endpoints": list(endpoints),
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in named.items()],
    }


def write_kubeconfig(
    folder: Path, url: str, *, user: Json | None = None, ca: str = "", **more: Any
) -> Path:
    """A kubeconfig (JSON is YAML) with one context, `fake`, of the namespace `test`.

    `more` is of its cluster, with underscores for dashes.
    """
    cluster: Json = {"server": url} | ({"certificate-authority": ca} if ca else {})
    cluster |= {name.replace("_", "-"): value for name, value in more.items()}
    context = {"cluster": "fake", "user": "fake", "namespace": "test"}
    made = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": cluster}],
        "contexts": [{"name": "fake", "context": context}],
        "users": [{"name": "fake", "user": user or {}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(made))
    return path
