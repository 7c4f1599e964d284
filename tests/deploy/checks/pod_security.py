"""The Pod Security Standards, as far as these manifests use what they restrict.

A namespace says which standard it enforces; every pod must satisfy it.
"""

from collections.abc import Iterator

from tests.deploy.checks.manifests import Container, Json, Overlay, Pod

ENFORCE = "pod-security.kubernetes.io/enforce"
HOST = ("hostNetwork", "hostPID", "hostIPC")
RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}


def complaints(overlay: Overlay) -> Iterator[str]:
    """What breaks the standard that the overlay's namespace enforces."""
    levels = [each["metadata"]["labels"].get(ENFORCE) for each in overlay.of("Namespace")]
    if levels not in (["restricted"], ["baseline"]):
        yield f"{overlay.name}: its namespace enforces neither restricted nor baseline: {levels}"
        return
    for pod in overlay.pods():
        yield from _baseline(pod)
        if levels == ["restricted"]:
            yield from _restricted(pod)


def _baseline(pod: Pod) -> Iterator[str]:
    for name in HOST:
        if pod.spec.get(name):
            yield f"{pod.where}: {name}"
    for volume in pod.spec.get("volumes", []):
        if "hostPath" in volume:
            yield f"{pod.where}: volume {volume['name']} is a hostPath"
    for each in pod.containers(init=True):
        if any("hostPort" in port for port in each.spec.get("ports", [])):
            yield f"{each.where}: hostPort"
        if _own(each).get("privileged"):
            yield f"{each.where}: privileged"
        if _seccomp(each) == "Unconfined":
            yield f"{each.where}: seccompProfile is Unconfined"
        if added := _capabilities(each, "add") - BASELINE_CAPABILITIES:
            yield f"{each.where}: adds {', '.join(sorted(added))}"


def _restricted(pod: Pod) -> Iterator[str]:
    for volume in pod.spec.get("volumes", []):
        if not RESTRICTED_VOLUMES & volume.keys():
            yield f"{pod.where}: volume {volume['name']} is of a kind that restricted forbids"
    for each in pod.containers(init=True):
        if _said(each, "runAsNonRoot") is not True:
            yield f"{each.where}: runAsNonRoot is not true"
        if _said(each, "runAsUser") == 0:
            yield f"{each.where}: runAsUser is 0"
        if _own(each).get("allowPrivilegeEscalation") is not False:
            yield f"{each.where}: allowPrivilegeEscalation is not false"
        if _seccomp(each) not in ("RuntimeDefault", "Localhost"):
            yield f"{each.where}: no seccompProfile"
        if "ALL" not in _capabilities(each, "drop"):
            yield f"{each.where}: does not drop ALL capabilities"
        if added := _capabilities(each, "add") - {"NET_BIND_SERVICE"}:
            yield f"{each.where}: adds {', '.join(sorted(added))}"


def _own(container: Container) -> Json:
    found: Json = container.spec.get("securityContext", {})
    return found


def _said(container: Container, name: str) -> object:
    """What the container says, else its pod."""
    return _own(container).get(name, container.pod.get("securityContext", {}).get(name))


def _seccomp(container: Container) -> str | None:
    profile = _said(container, "seccompProfile")
    return profile["type"] if isinstance(profile, dict) else None


def _capabilities(container: Container, verb: str) -> set[str]:
    return set(_own(container).get("capabilities", {}).get(verb, []))
