"""Which kinds of cache groups ran, with which vLLM and on what: the table of docs/vllm.md.

Tests note what they ran, if KVROUTER_COMPATIBILITY names a folder. As a command, this compares the
table with such notes, but for columns that have none, such as that of GPUs on a machine without
one; with --write, it writes the table:

    python -m tests.vllm.compatibility FOLDER [--write]
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
BEGIN, END = "<!-- what ran -->\n", "<!-- end -->\n"
ENGINES, SCHEDULER, GPU = "CPU engines", "scheduler", "GPU"
COLUMNS = (("0.32", ENGINES), ("0.32", SCHEDULER), ("0.33", SCHEDULER), ("0.32", GPU))
MODELS = {
    "full attention": "Qwen2",
    "full attention, fp8 KV": "Qwen2",
    "sliding window": "Mistral",
    "full, sliding window": "Gemma 3",
    "full, sliding window, sinks, experts": "gpt-oss",
    "full, linear attention": "Qwen3-Next",
    "full, Mamba-2": "Nemotron-H",
    "MLA": "DeepSeek-V2",
    "MLA, sparse": "",
    "MLA, sliding window, packed": "",
    "MLA, sliding window, state": "",
    "full, two sliding windows": "",
    "MLA, draft layers": "",
}
"""The rows of the table, with the models that the tests make."""


def note(groups: str, series: str, how: str, found: str = "yes") -> None:
    """A test ran these groups with vLLM of this series; or why it could not ('needs AMX')."""
    assert groups in MODELS, groups
    if folder := os.environ.get("KVROUTER_COMPATIBILITY"):
        path = Path(folder) / f"{groups} {series} {how}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([groups, series, how, found]))


def notes(folder: Path) -> dict[tuple[str, str, str], str]:
    """What tests noted there."""
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return {(groups, series, how): said for groups, series, how, said in found}


def kept(said: str, found: dict[tuple[str, str, str], str]) -> dict[tuple[str, str, str], str]:
    """What a table says where the notes say nothing: in columns without any, and of groups that ran
    elsewhere and for which this machine has no processor."""
    noted = {(series, how) for _, series, how in found}
    rows = (line.strip("|").split("|") for line in said.strip().splitlines()[2:])
    return {
        (groups, *column): cell
        for groups, _, *cells in rows
        for column, cell in zip(COLUMNS, cells, strict=True)
        if column not in noted
        or (cell == "yes" and found.get((groups, *column), "").startswith("needs "))
    }


def table(found: dict[tuple[str, str, str], str]) -> str:
    """Markdown: a row for each kind of groups, a column for each vLLM and what ran of it."""
    head = ["Cache groups", "Model", *(f"{series}, {how}" for series, how in COLUMNS)]
    rows = [
        [groups, model or "-", *(found.get((groups, *each), "-") for each in COLUMNS)]
        for groups, model in MODELS.items()
    ]
    return "".join(_lines([head, ["---"] * len(head), *rows]))


def _lines(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    for row in rows:
        yield f"|{'|'.join(row)}|\n"


def main(folder: str, *flags: str) -> int:
    """0 if the page says what ran."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    said, _, tail = rest.partition(END)
    found = notes(Path(folder))
    now = table(found | kept(said, found))
    if flags == ("--write",):
        PAGE.write_text(f"{head}{BEGIN}\n{now}\n{END}{tail}")
        return 0
    if said.strip() == now.strip():
        return 0
    print(f"{PAGE.name} says:\n{said}\nbut this ran:\n\n{now}")
    print(f"if that is right: python -m tests.vllm.compatibility {folder} --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
