"""Sizes that are held, by area: lines of code, words of documentation. `pytest -s` prints them.

Where an area is larger than its target, its size of the last release is the ceiling. A ceiling goes
down at any time; up at a release, with one sentence in CHANGELOG, or by as many lines as another
area's goes down. What a capability adds within a ceiling, it says in its commit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROUTER = ROOT / "router/kvrouter"
TOOLS = "router/kvrouter/tools"
WRITTEN_BY_PROGRAMS = {
    "configuration.md",
    "doctor-checks.md",
    "failures.md",
    "metrics.md",
    "parameters.md",
    "tested.md",
    "why-causes.md",
}

REQUEST_PATH = """
openai/request.py
openai/response.py
openai/sse.py
serving/handler.py
serving/request/context.py
serving/legs/orchestrator.py
serving/legs/inputs.py
serving/legs/prefill.py
serving/legs/leg.py
serving/streaming/relay.py
routing/plan.py
routing/policies/base.py
routing/policies/prefix.py
http/client/pool.py
http/client/response.py
http/server/exchange.py
http/headers.py
""".strip().splitlines()
"""What a streamed completion goes through, from the parsing of its body to its last byte.

Not counted: what comes before that (HTTP server, keys, admission) and after it (settlement), and
what is asked on the way: engine pool, an engine's family, prefix index, store.
`tests/integration/router/test_request_path.py` holds the list to what runs.
"""


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    """What has a letter or a digit: the bars of a table are no words."""
    parts = (part for path in paths for part in path.read_text().split())
    return sum(any(map(str.isalnum, part)) for part in parts)


def python(folder: str, without: str = "") -> list[Path]:
    """The Python files below a folder, but for those below another one in it."""
    files = (ROOT / folder).rglob("*.py")
    return [path for path in files if not without or (ROOT / without) not in path.parents]


def product_cpp() -> list[Path]:
    return [
        path
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in {".h", ".cpp"} and not {"tests", "fuzz"} & set(path.parts)
    ]


def documentation() -> list[Path]:
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name not in WRITTEN_BY_PROGRAMS]
    return [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")), *pages]


def request_path() -> list[Path]:
    return [ROUTER / name for name in REQUEST_PATH]


@dataclass(frozen=True)
class Budget:
    what: str
    size: Callable[[], int]
    target: int
    ceiling: int


BUDGETS = (
    Budget("router, lines", lambda: lines(python("router", TOOLS)), 28_500, 32_530),
    Budget("router's tools, lines", lambda: lines(python(TOOLS)), 5_500, 6_460),
    Budget("store, lines", lambda: lines(python("store")), 14_500, 17_400),
    Budget("examples, lines", lambda: lines(python("examples")), 700, 900),
    Budget("benchmarks, lines", lambda: lines(python("benchmarks")), 7_000, 7_550),
    Budget("csrc, lines", lambda: lines(product_cpp()), 18_000, 19_610),
    Budget("request path, lines", lambda: lines(request_path()), 3_900, 4_240),
    Budget("request path, files", lambda: len(request_path()), 16, 17),
    Budget("documentation, words", lambda: words(documentation()), 25_730, 25_730),
    Budget("README, words", lambda: words([ROOT / "README.md"]), 567, 567),
    Budget("ARCHITECTURE, words", lambda: words([ROOT / "ARCHITECTURE.md"]), 1_775, 1_775),
)


def test_the_budgets_are_printed() -> None:
    print(f"\n{'':24}{'now':>8}{'ceiling':>9}{'target':>8}")
    for budget in BUDGETS:
        size = budget.size()
        beyond = "" if size <= budget.target else f"  {size - budget.target} to go"
        print(f"{budget.what:24}{size:8}{budget.ceiling:9}{budget.target:8}{beyond}")


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.what)
def test_a_size_stays_within_its_budget(budget: Budget) -> None:
    assert budget.target <= budget.ceiling
    assert budget.size() <= budget.ceiling
