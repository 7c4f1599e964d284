"""Names, selectors and ports that objects give each other: only a cluster tells a wrong one."""

import re
from collections.abc import Iterator

from tests.deploy.checks.manifests import Container, Json, Overlay, Pod, selects

SECRETS = {
    "kvrouter": {"admin-token", "api-keys.yaml", "store-token"},
    "kvstore": {"tokens"},
    "kvrouter-redis": {"password"},
}
"""The Secrets that docs/kubernetes.md makes, with their keys."""


def complaints(overlay: Overlay) -> Iterator[str]:
    for pod in overlay.pods():
        yield from _of_pod(overlay, pod)
        for container in pod.containers(init=True):
            yield from _of_container(pod, container)
    for service in overlay.of("Service"):
        yield from _of_service(overlay, service)
    yield from _budgets(overlay)
    yield from _scalers(overlay)


def _of_pod(overlay: Overlay, pod: Pod) -> Iterator[str]:
    if pod.spec.get("enableServiceLinks") is not False:
        yield f"{pod.where}: enableServiceLinks is not false: a Service may set KVROUTER_PORT"
    account = pod.spec.get("serviceAccountName")
    if account and account not in overlay.names("ServiceAccount"):
        yield f"{pod.where}: no ServiceAccount {account}"
    if account is None and pod.spec.get("automountServiceAccountToken") is not False:
        yield f"{pod.where}: it needs no token of the API server, but mounts one"
    for volume in pod.spec.get("volumes", []):
        for kind, key, field in (
            ("ConfigMap", "configMap", "name"),
            ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
        ):
            name = volume.get(key, {}).get(field)
            if name and name not in overlay.names(kind):
                yield f"{pod.where}: volume {volume['name']}: no {kind} {name}"
        secret = volume.get("secret", {}).get("secretName")
        if secret and secret not in SECRETS:
            yield f"{pod.where}: volume {volume['name']}: nobody makes the Secret {secret}"


def _of_container(pod: Pod, container: Container) -> Iterator[str]:
    volumes = {each["name"] for each in pod.spec.get("volumes", [])} | pod.claims
    for mount in container.spec.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"{container.where}: no volume {mount['name']}"
    yield from _secrets(container)
    yield from _variables(container)
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        port = container.spec.get(kind, {}).get("httpGet", {}).get("port")
        if port is not None and port not in {*container.ports, *container.ports.values()}:
            yield f"{container.where}: {kind}: no port {port}"


def _secrets(container: Container) -> Iterator[str]:
    """Keys of Secrets in the environment that nobody makes."""
    for name, each in container.env.items():
        secret = each.get("valueFrom", {}).get("secretKeyRef", {"optional": True})
        if not secret.get("optional") and secret["key"] not in SECRETS.get(secret["name"], ()):
            yield f"{container.where}: {name}: nobody makes {secret['name']}.{secret['key']}"


def _variables(container: Container) -> Iterator[str]:
    """$(NAME) of what is not there, or, in the environment, not there yet."""
    known: set[str] = set()
    for each in container.env.values():
        for name in _named(each.get("value", "")):
            if name not in known:
                yield f"{container.where}: {each['name']}: no variable {name} before it"
        known.add(each["name"])
    for argument in container.arguments:
        for name in _named(argument):
            if name not in known:
                yield f"{container.where}: no variable {name}"


def _named(text: str) -> list[str]:
    return re.findall(r"\$\((\w+)\)", text)


def _of_service(overlay: Overlay, service: Json) -> Iterator[str]:
    where = overlay.title(service)
    selector = {"matchLabels": service["spec"].get("selector", {})}
    pods = [pod for pod in overlay.pods() if selects(selector, pod.labels)]
    if not pods or not selector["matchLabels"]:
        yield f"{where}: it selects no pods"
    for pod in pods:
        named = {name for each in pod.containers() for name in each.ports}
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in {*named, *pod.ports}:
                yield f"{where}: {pod.where} has no port {port['targetPort']}"


def _budgets(overlay: Overlay) -> Iterator[str]:
    """With two budgets for a pod, nothing may evict it."""
    budgets = list(overlay.of("PodDisruptionBudget"))
    for pod in overlay.pods():
        those = [each for each in budgets if selects(each["spec"]["selector"], pod.labels)]
        if len(those) > 1:
            yield f"{pod.where}: it has {len(those)} PodDisruptionBudgets"
    for each in budgets:
        if not any(selects(each["spec"]["selector"], pod.labels) for pod in overlay.pods()):
            yield f"{overlay.title(each)}: it selects no pods"


def _scalers(overlay: Overlay) -> Iterator[str]:
    for each in overlay.of("ScaledObject", "HorizontalPodAutoscaler"):
        name = each["spec"]["scaleTargetRef"]["name"]
        target = [item for item in overlay.of("Deployment") if item["metadata"]["name"] == name]
        if not target:
            yield f"{overlay.title(each)}: no Deployment {name}"
        elif "replicas" in target[0]["spec"]:
            yield f"{overlay.title(each)}: Deployment {name} fixes its replicas"
