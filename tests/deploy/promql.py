"""What expressions of Prometheus name."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser

TARGET_LABELS = frozenset({"job", "instance", "namespace"})
"""Labels that Prometheus itself gives to series."""
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "$model": ".*"}
"""Of the dashboard, with values that select everything."""


@dataclass(slots=True)
class Named:
    """Metrics of an expression with the labels by which it selects them, and other labels."""

    metrics: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def filled(expr: str) -> str:
    """An expression of the dashboard as Grafana would send it."""
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


def named(expr: str) -> Named:
    """What an expression names. Raises ValueError where it is none."""
    found = Named()
    promql_parser.walk(promql_parser.parse(expr), lambda node: _note(node, found))
    return found


def _note(node: promql_parser.Expr, found: Named) -> None:
    if isinstance(node, promql_parser.VectorSelector):
        labels = frozenset(matcher.name for matcher in node.matchers.matchers)
        found.metrics.append((str(node.name), labels))
    found.grouped |= set(_labels(getattr(node, "modifier", None)))


def _labels(modifier: object) -> Iterator[str]:
    yield from getattr(modifier, "labels", ())
    matching = getattr(modifier, "matching", None)
    yield from getattr(matching, "labels", ())
