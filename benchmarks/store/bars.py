"""The bars of the store benchmark. A missing figure misses its bar."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.store.figures import Cell, Key
from benchmarks.store.measure import Results
from benchmarks.store.plan import BATCHES, BOTH, FUSED, MATCHES, SHM, SIZES

CPU_LIMIT, P10_LIMIT = 1.15, 1.25
VIEW_LIMIT_US = 30.0
MIXED_GB_PER_S, MIXED_SHARE = 4.0, 0.8
MATCHES_PER_S = 100_000.0
OURS_TCP, RAW_TCP = "kvstore tcp", "raw C tcp+crc32c"
UNVERIFIED_TCP = "kvstore tcp unverified"
VIEW = "kvstore view"
RIVALS = ("Mooncake", "Redis")


@dataclass(frozen=True)
class Bar:
    """A figure and its limit: at most `limit`, or with `at_least` at least that.

    `lost`: the cells that were behind, if the figure is their number.
    """

    value: float | None
    limit: float
    at_least: bool = False
    lost: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        """Whether the figure is within its limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def judge(results: Results) -> dict[str, Bar]:
    """Every bar by name: ratios of cells of one client, measured in the same rounds."""
    cells = {(cell.key, cell.contender): cell for cell in results.cells}
    bars: dict[str, Bar] = {}
    for op, batch in ((op, batch) for op in BOTH for batch in BATCHES):
        pair = _pair(cells, Key("1MiB", op, batch, 1), SHM.name, FUSED.name)
        bars[f"shm_1mib_{op}_x{batch}_cpu"] = Bar(_ratio(pair, "cpu_s_per_gb"), CPU_LIMIT)
        bars[f"shm_1mib_{op}_x{batch}_p10"] = Bar(_ratio(pair, "p10_us"), P10_LIMIT)
    view = cells.get((Key("1MiB", "get", 1, 1), VIEW))
    bars["view_1mib_p50_us"] = Bar(view.p50_us if view else None, VIEW_LIMIT_US)
    bars["mixed_shm_1mib_c2_gb_per_s"] = _mixed(results)
    for size, op, batch in ((s, op, b) for s in SIZES for op in BOTH for b in BATCHES):
        pair = _pair(cells, Key(size, op, batch, 1), OURS_TCP, RAW_TCP)
        name = f"tcp_{size.lower()}_{op}_x{batch}_cpu"
        bars[name] = Bar(_ratio(pair, "cpu_s_per_gb"), CPU_LIMIT)
    for rival in RIVALS:
        name = f"ahead_of_{rival.lower()}"
        bars[name] = _ahead(cells, rival, UNVERIFIED_TCP)  # they have no digests either
        bars[f"{name}_verified"] = _ahead(cells, rival, OURS_TCP)
    pipelined = [r.per_s for r in results.matches if r.contender == MATCHES[0][0].name]
    bars["match_64_per_s"] = Bar(max(pipelined, default=None), MATCHES_PER_S, at_least=True)
    return bars


def _pair(
    cells: dict[tuple[Key, str], Cell], key: Key, ours: str, floor: str
) -> tuple[Cell, Cell] | None:
    a, b = cells.get((key, ours)), cells.get((key, floor))
    return (a, b) if a and b else None


def _ratio(pair: tuple[Cell, Cell] | None, what: str) -> float | None:
    if pair is None:
        return None
    ours, floor = (float(getattr(cell, what)) for cell in pair)
    return ours / floor if floor else None


def _mixed(results: Results) -> Bar:
    """4 GB/s, or a share of the rate of copies fused with the digest, whichever is less."""
    rates = {rate.contender: rate.per_s * SIZES["1MiB"] / 1e9 for rate in results.mixed}
    floor = rates.get(FUSED.name)
    limit = min(MIXED_GB_PER_S, MIXED_SHARE * floor) if floor else MIXED_GB_PER_S
    return Bar(rates.get(SHM.name), limit, at_least=True)


def _ahead(cells: dict[tuple[Key, str], Cell], rival: str, ours: str) -> Bar:
    """In how many cells our row has a higher p50 or more CPU than another store over TCP."""
    theirs = [cell for (_, name), cell in cells.items() if name == rival]
    if not theirs:
        return Bar(None, 0.0)
    lost = tuple(_losses(cells, theirs, ours))
    return Bar(float(len(lost)), 0.0, lost=lost)


def _losses(cells: dict[tuple[Key, str], Cell], theirs: Iterable[Cell], ours: str) -> Iterable[str]:
    for cell in sorted(theirs, key=lambda cell: cell.key):
        own = cells.get((cell.key, ours))
        if own is None:
            yield f"{cell.key}: not measured"
        elif own.p50_us > cell.p50_us or own.cpu_s_per_gb > cell.cpu_s_per_gb:
            yield (
                f"{cell.key}: p50 {own.p50_us:.0f} beside {cell.p50_us:.0f} us, "
                f"{own.cpu_s_per_gb:.2f} beside {cell.cpu_s_per_gb:.2f} CPU s/GB"
            )
