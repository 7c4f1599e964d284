"""The objects that an overlay makes, and how they refer to each other."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.kubernetes.kubectl import kubectl

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
RUN_PODS = {"Deployment", "StatefulSet", "DaemonSet"}


@dataclass(frozen=True)
class Container:
    """A container and the pod around it."""

    where: str
    spec: Json
    pod: Json

    @property
    def env(self) -> dict[str, Json]:
        return {each["name"]: each for each in self.spec.get("env", [])}

    @property
    def ports(self) -> dict[str, int]:
        """Numbers by name."""
        return {each["name"]: each["containerPort"] for each in self.spec.get("ports", [])}

    @property
    def arguments(self) -> list[str]:
        """Its command line without the entry point of kvrouter's image."""
        return [*self.spec.get("command", []), *self.spec.get("args", [])]

    @property
    def expanded(self) -> list[str]:
        """Its command line with the variables whose values stand here."""
        values = {name: each["value"] for name, each in self.env.items() if "value" in each}
        return [
            re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), each)
            for each in self.arguments
        ]

    @property
    def runs_kvrouter(self) -> bool:
        return "command" not in self.spec


@dataclass(frozen=True)
class Pod:
    """What a workload says of its pods; `claims` are the volumes that it makes for each."""

    where: str
    labels: dict[str, str]
    spec: Json
    claims: frozenset[str]

    def containers(self, *, init: bool = False) -> Iterator[Container]:
        kinds = ("initContainers", "containers") if init else ("containers",)
        for kind in kinds:
            for spec in self.spec.get(kind, []):
                yield Container(f"{self.where}/{spec['name']}", spec, self.spec)

    @property
    def ports(self) -> set[int]:
        return {port for each in self.containers() for port in each.ports.values()}


@dataclass(frozen=True)
class Overlay:
    """All objects of one overlay."""

    name: str
    objects: Sequence[Json]

    def of(self, *kinds: str) -> Iterator[Json]:
        return (each for each in self.objects if each["kind"] in kinds)

    def names(self, kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in self.of(kind)}

    def pods(self) -> Iterator[Pod]:
        for each in self.of(*RUN_PODS):
            template = each["spec"]["template"]
            made = each["spec"].get("volumeClaimTemplates", [])
            claims = frozenset(claim["metadata"]["name"] for claim in made)
            yield Pod(self.title(each), template["metadata"]["labels"], template["spec"], claims)

    def containers(self) -> Iterator[Container]:
        for pod in self.pods():
            yield from pod.containers()

    def title(self, item: Json) -> str:
        return f"{self.name}: {item['kind']}/{item['metadata']['name']}"


def overlays() -> list[Overlay]:
    """The base and every overlay; RuntimeError: Kustomize refuses one."""
    folders = [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]
    return [rendered(folder) for folder in folders]


@cache
def rendered(folder: Path) -> Overlay:
    """What Kustomize makes of a folder."""
    done = subprocess.run(
        [kubectl(), "kustomize", folder], capture_output=True, text=True, check=False
    )
    if done.returncode or done.stderr:
        raise RuntimeError(f"{folder.relative_to(ROOT)}: {done.stderr.strip()}")
    return Overlay(folder.name, [each for each in yaml.safe_load_all(done.stdout) if each])


def unused_components() -> list[str]:
    """Components that no overlay takes, directly or through another."""
    components = set((KUBERNETES / "components").iterdir())
    reached: set[Path] = set()
    waiting = list((KUBERNETES / "overlays").iterdir())
    while waiting:
        folder = waiting.pop()
        taken = yaml.safe_load((folder / "kustomization.yaml").read_text())
        named = [*taken.get("resources", []), *taken.get("components", [])]
        found = {path for each in named if (path := (folder / each).resolve()).is_dir()} - reached
        reached |= found
        waiting += found
    return [f"{each.relative_to(ROOT)}: no overlay takes it" for each in components - reached]


def selects(selector: Json, labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes matches these labels; an empty one matches all."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for each in selector.get("matchExpressions", []):
        value = labels.get(each["key"])
        match each["operator"]:
            case "Exists":
                holds = value is not None
            case "DoesNotExist":
                holds = value is None
            case "In":
                holds = value in each["values"]
            case _:
                holds = value not in each["values"]
        if not holds:
            return False
    return True
