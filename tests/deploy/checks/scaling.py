"""What scales the engines: metrics that kvrouter has, under the names that scalers ask for."""

import re
from collections.abc import Iterator, Sequence

import yaml
from tests.deploy.checks.manifests import KUBERNETES, ROOT, Overlay


def complaints(every: Sequence[Overlay]) -> Iterator[str]:
    rules = yaml.safe_load((KUBERNETES / "components/hpa/adapter.yaml").read_text())
    offered = {rule["name"]["as"] for rule in rules["externalRules"]}
    for rule in rules["externalRules"]:
        yield from _unknown("adapter.yaml", rule["seriesQuery"])
    for overlay in every:
        for each in overlay.of("ScaledObject"):
            for trigger in each["spec"]["triggers"]:
                yield from _unknown(overlay.title(each), trigger["metadata"]["query"])
        for each in overlay.of("HorizontalPodAutoscaler"):
            for metric in each["spec"]["metrics"]:
                name = metric["external"]["metric"]["name"]
                if name not in offered:
                    yield f"{overlay.title(each)}: adapter.yaml offers no metric {name}"


def _unknown(where: str, text: str) -> Iterator[str]:
    """Names of metrics in the text that kvrouter does not have."""
    listed = (ROOT / "docs/metrics.md").read_text()
    for name in re.findall(r"kv(?:router|store):\w+", text):
        if f"`{name}`" not in listed:
            yield f"{where}: there is no metric {name}"
