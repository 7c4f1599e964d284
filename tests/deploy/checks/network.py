"""Whether the NetworkPolicies let through what the fleet needs, and nothing else inside it."""

import re
from collections.abc import Iterator
from typing import Literal

from tests.deploy.checks.manifests import Json, Overlay, Pod, selects

COMPONENT = "app.kubernetes.io/component"
Direction = Literal["Ingress", "Egress"]


def complaints(overlay: Overlay) -> Iterator[str]:
    pods = list(overlay.pods())
    policies = list(overlay.of("NetworkPolicy"))
    for policy in policies:
        yield from _idle(overlay, policy, pods)
    for source in pods:
        for target in pods:
            for port in sorted(target.ports):
                wanted = _wanted(source, target, port)
                if allowed(policies, source, target, port) != wanted:
                    verb = "cannot reach" if wanted else "may reach"
                    yield f"{source.where} {verb} {target.where} at port {port}"


def _wanted(source: Pod, target: Pod, port: int) -> bool:
    """The flows of the fleet."""
    pair = source.labels[COMPONENT], target.labels[COMPONENT]
    if pair == ("engine", "engine"):
        return not _uses_store(source)
    if pair == ("router", "engine"):
        return port in (8000, 5557, 5558)
    if pair == ("router", "store"):
        return port in (7400, 5557, 5558)
    return pair == ("engine", "store") and port == 7400


def _uses_store(engine: Pod) -> bool:
    return any(
        re.search(r"kv(\+unix)?://", word) for each in engine.containers() for word in each.expanded
    )


def allowed(policies: list[Json], source: Pod, target: Pod, port: int) -> bool:
    """Whether a connection from one pod of the namespace to another passes."""
    return _passes(policies, "Egress", source, target, port) and _passes(
        policies, "Ingress", target, source, port
    )


def _passes(policies: list[Json], way: Direction, pod: Pod, peer: Pod, port: int) -> bool:
    mine = [
        each["spec"]
        for each in policies
        if way in each["spec"]["policyTypes"] and selects(each["spec"]["podSelector"], pod.labels)
    ]
    rules = [rule for each in mine for rule in each.get(way.lower(), [])]
    return not mine or any(_lets(rule, way, peer, port) for rule in rules)


def _lets(rule: Json, way: Direction, peer: Pod, port: int) -> bool:
    peers = rule.get("from" if way == "Ingress" else "to")
    ports = rule.get("ports")
    if ports is not None and not any(
        each["port"] == port and each["protocol"] == "TCP" for each in ports
    ):
        return False
    return peers is None or any(
        "podSelector" in each
        and "namespaceSelector" not in each
        and selects(each["podSelector"], peer.labels)
        for each in peers
    )


def _idle(overlay: Overlay, policy: Json, pods: list[Pod]) -> Iterator[str]:
    """A policy for pods or ports that nothing has."""
    where, spec = overlay.title(policy), policy["spec"]
    mine = [pod for pod in pods if selects(spec["podSelector"], pod.labels)]
    if not mine:
        yield f"{where}: it selects no pods"
    for rule in spec.get("ingress", []):
        for each in rule.get("ports", []):
            if not any(each["port"] in pod.ports for pod in mine):
                yield f"{where}: none of its pods has the port {each['port']}"
