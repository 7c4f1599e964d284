"""The figures as text: a table for a terminal, and Markdown."""

from collections.abc import Iterator, Sequence

from benchmarks.store.bars import Bar
from benchmarks.store.figures import Cell, Key, Rate
from benchmarks.store.measure import Results
from benchmarks.store.plan import BATCHES, BOTH, CLIENTS, RANGED, SIZES

__all__ = ["lines", "markdown"]

ROW = "{:<26}{:>8}{:>11}{:>11}{:>11}{:>10}"
ORDER = {entry.name: number for number, entry in enumerate(RANGED)}
VIEWS = "kvstore view"
UNVERIFIED = (
    "Verified: the client digests what it puts, the node checks that as it comes, the client "
    "checks what it gets. Unverified: the node has digests off. Other stores have none: the bars "
    "ahead_of_* compare them with the unverified rows, like with like, and ahead_of_*_verified "
    "with the verified ones."
)


def lines(results: Results, bars: dict[str, Bar]) -> Iterator[str]:
    """The machine, all cells, the rates, the missing stores, and the bars."""
    yield f"{results.placed}:"
    yield ROW.format("", "GB/s", "p10 us", "p50 us", "p99 us", "CPU s/GB")
    for key in _keys(results.cells):
        yield f"-- {key}"
        for cell in _at(results.cells, key):
            yield _row(cell)
    yield "-- mixed put and get of 1 MiB, batches of 16, sustained"
    for rate in results.mixed:
        yield f"{rate.contender:<26}{_gb_per_s(rate):>8.2f} GB/s, {_clients(rate)}"
    yield "-- match of 64 keys"
    for rate in results.matches:
        yield f"{rate.contender:<26}{rate.per_s:>8.0f} per s, {_clients(rate)}, " + (
            f"{rate.cpu_us:.1f} us of CPU"
        )
    yield UNVERIFIED
    for name, why in results.skipped.items():
        yield f"{name} was left out: {why}"
    for name, bar in bars.items():
        yield _verdict(name, bar)
        yield from (f"    {lost}" for lost in bar.lost)


def markdown(results: Results) -> Iterator[str]:
    """Tables by operation and number of clients, without rows of stores that were not measured."""
    for clients in CLIENTS:
        for op in BOTH:
            cells = [c for c in results.cells if (c.key.op, c.key.clients) == (op, clients)]
            if cells:
                yield from _grid(op, clients, cells)
                yield ""
    yield "| sustained, by | clients | put and get of 16 x 1 MiB | match of 64 keys |"
    yield "|---|---|---|---|"
    for rate in results.mixed:
        yield f"| {rate.contender} | {rate.clients} | {_gb_per_s(rate):.1f} GB/s | |"
    for rate in results.matches:
        yield f"| {rate.contender} | {rate.clients} | | {rate.per_s:,.0f}/s |"


def _grid(op: str, clients: int, cells: Sequence[Cell]) -> Iterator[str]:
    columns = [(size, batch) for size in SIZES for batch in BATCHES]
    columns = [c for c in columns if any((x.key.size, x.key.batch) == c for x in cells)]
    heads = (f"{batch} x {size}" for size, batch in columns)
    yield f"| {op}, {clients} client{'s' * (clients > 1)} | " + " | ".join(heads) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    figures = {(c.contender, c.key.size, c.key.batch): c for c in cells}
    for name in sorted({c.contender for c in cells}, key=_rank):
        row = (_text(figures.get((name, *column))) for column in columns)
        yield f"| {name} | " + " | ".join(row) + " |"


def _text(cell: Cell | None) -> str:
    return f"{cell.p50_us:,.0f} us, {cell.cpu_s_per_gb:.2f}" if cell else "-"


def _row(cell: Cell) -> str:
    moved = "-" if cell.contender.startswith(VIEWS) else f"{cell.gb_per_s:.2f}"
    latencies = (f"{us:.1f}" for us in (cell.p10_us, cell.p50_us, cell.p99_us))
    return ROW.format(cell.contender, moved, *latencies, f"{cell.cpu_s_per_gb:.3f}")


def _verdict(name: str, bar: Bar) -> str:
    value = "not measured" if bar.value is None else f"{bar.value:,.2f}"
    word = "at least" if bar.at_least else "at most"
    return f"{'met   ' if bar.met else 'MISSED'} {name}: {value}, {word} {bar.limit:,.2f}"


def _keys(cells: Sequence[Cell]) -> list[Key]:
    sizes = list(SIZES)
    return sorted(
        {cell.key for cell in cells},
        key=lambda key: (key.clients, sizes.index(key.size), BOTH.index(key.op), key.batch),
    )


def _at(cells: Sequence[Cell], key: Key) -> list[Cell]:
    return sorted((c for c in cells if c.key == key), key=lambda cell: _rank(cell.contender))


def _rank(name: str) -> int:
    return ORDER.get(name, len(ORDER))


def _gb_per_s(rate: Rate) -> float:
    return rate.per_s * SIZES["1MiB"] / 1e9


def _clients(rate: Rate) -> str:
    return f"{rate.clients} client" + "s" * (rate.clients > 1)
