"""Sizes that are held: lines of the product, words of its documentation. `pytest -s` prints them.

Where the tree is larger than its target, today's size is the ceiling. A ceiling goes down; up only
with a capability that says what it adds: KV of any torch code, layer by layer (Python 950, of which
800 came from vLLM's first connector; words 330, of which 150 came from its page); sessions of
engines whose block hashes are unknown (Python 285, of which 15 in the request path; words 90); what
agents send, and TensorRT-LLM (Python 190, of which 13 in the request path; words 105); several
models (Python 600, of which 75 in the request path; words 450), signals by model and key, and
settings for failures (Python 760, of which 41; words 190), what the status page tells (Python 450;
words 215), fairness by tokens (Python 100; words 130), both legs of what agents send, ageing,
images, SGLang's events (Python 350, of which 20; words 95); discovery in Kubernetes and secrets
from files (Python 1,100; words 560), CRC32C by aarch64's own instruction (C++ 30), quickstarts,
troubleshooting, sizing, migration and security (words 5,700), Kubernetes manifests (words 1,000),
a runbook of each alert (words 1,650), the promise of compatibility (words 700), kubeconfigs read
without a package of 70 MB that leaks secrets and processes (Python 600); SGLang's HiCache
over the store (Python 580; words 500); an adapter of LMCache's server (Python 1,040, of which 36
let any engine's flags have the store's settings; words 580); questions to tiers below a node, and
a feed of what it holds (C++ 600), tiers over Redis, Mooncake Store and InfiniStore (Python 1,650;
words 640), several store nodes (Python 790, of which 324 let an engine read other nodes; words
710); tiers get what they lacked when they are back, and InfiniStore's real answers (Python 70;
words 100), what newcomers missed with vLLM (words 110), landing in fleets on
Mooncake Store or LMCache (Python 560; words 370), store nodes that publish what they hold and that
discovery finds (Python 600, C++ 20; words 420), a doctor who asks for a tier (Python 15; words 50),
speed of tiers (C++ 15; words 100); what a node says of tiers that are away or full, and the router
of nodes (Python 230, of which 15 in the request path, C++ 5; words 490), engines and nodes of one
Kubernetes node (Python 40), values of Redis without copies (Python 220), several threads for one
prompt, and first tokens on a GPU (Python 280; words 190), nodes that leave the list, weights that
change again and again, clusters of Redis without one master, and hangs that went unnoticed
(Python 300, of which 10 in the request path, C++ 10; words 160), what newcomers missed with tiers,
several hosts, LMCache and Mooncake (words 800), memory that a device registers once, and what
LMCache's coordinator does not know (Python 350), the life of engines, one table of failures,
comments to clients that wait, room for many hits at once, bounds of what peers send, and a server
of our own in place of two frameworks' (Python 3,250, of which 120 in the request path, C++ 650;
words 1,100), side doors, odd engines and a newcomer's first hour: CORS, encoded bodies, multipart,
salts from keys, client certificates, a simulator that keeps to schemas, memory limits of containers
(Python 1,750, of which 90 in the request path, C++ 100; words 1,370).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROUTER = ROOT / "router/kvrouter"
WRITTEN_BY_PROGRAMS = {
    "configuration.md",
    "doctor-checks.md",
    "failures.md",
    "metrics.md",
    "parameters.md",
}

REQUEST_PATH = """
openai/request.py
openai/response.py
openai/sse.py
serving/handler.py
serving/request/context.py
serving/request/headers.py
serving/legs/orchestrator.py
serving/legs/inputs.py
serving/legs/prefill.py
serving/legs/leg.py
serving/streaming/relay.py
routing/plan.py
routing/reservations.py
routing/prefill_priority.py
routing/policies/base.py
routing/policies/prefix.py
http/client/pool.py
http/client/connection.py
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
    return sum(len(path.read_text().split()) for path in paths)


def product_python() -> list[Path]:
    return [path for top in ("router", "store") for path in (ROOT / top).rglob("*.py")]


def examples() -> list[Path]:
    return list((ROOT / "examples").rglob("*.py"))


def benchmarks() -> list[Path]:
    return list((ROOT / "benchmarks").rglob("*.py"))


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
    Budget("product Python, lines", lambda: lines(product_python()), 37_000, 58_600),
    Budget("examples, lines", lambda: lines(examples()), 700, 920),
    Budget("benchmarks, lines", lambda: lines(benchmarks()), 7_000, 7_700),
    Budget("product C++, lines", lambda: lines(product_cpp()), 18_000, 19_500),
    Budget("request path, lines", lambda: lines(request_path()), 4_000, 4_330),
    Budget("request path, files", lambda: len(request_path()), 30, 30),
    Budget("documentation, words", lambda: words(documentation()), 20_000, 29_050),
    Budget("README, words", lambda: words([ROOT / "README.md"]), 700, 700),
    Budget("ARCHITECTURE, words", lambda: words([ROOT / "ARCHITECTURE.md"]), 1_850, 1_850),
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
