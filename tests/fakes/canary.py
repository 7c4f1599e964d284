"""What a canary found, read from the router's metrics."""

from collections import Counter

from kvrouter.app.build import App


def canary_outcomes(app: App) -> Counter[str]:
    """How many samples ended how, so far."""
    families = (each for each in app.core.metrics.collect() if each.name == "kvrouter:canary")
    samples = (s for family in families for s in family.samples)
    return Counter({s.labels["outcome"]: int(s.value) for s in samples if s.value})
