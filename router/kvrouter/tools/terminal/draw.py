"""The status document as lines of plain text and tables. Pure: `run` prints them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from pydantic import ByteSize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrouter.control.page.model import EngineCard, Minute, Snapshot, StoreCard

MAX_ROWS: Final = 10
"""Rows of the tables of flows and requests."""
_BUCKETS: Final = 12
"""Buckets of the history in a minute."""
_PARTS: Final = ("queue", "tokenise", "plan", "prefill", "landing", "decode")
_STYLES: Final = {"": "", "bold": "\x1b[1m", "red": "\x1b[31m", "yellow": "\x1b[33m"}


class Line(NamedTuple):
    """One line of the screen. `style`: "", "bold", "red" or "yellow"."""

    text: str
    style: str = ""

    def shown(self, width: int, *, colours: bool) -> str:
        """The line in at most `width` cells, without characters that control a terminal."""
        cut = "".join(c if c.isprintable() else "?" for c in self.text[:width])
        return f"{_STYLES[self.style]}{cut}\x1b[0m" if colours and self.style else cut


def screen(snapshot: Snapshot) -> list[Line]:
    """The whole document."""
    parts = (
        _router(snapshot),
        _minute(snapshot),
        _engines(snapshot.engines),
        _flows(snapshot),
        *(_store(card) for card in snapshot.stores or (snapshot.store,)),
        _requests(snapshot),
    )
    lines: list[Line] = []
    for part in map(list, parts):
        lines += [Line(""), *part] if lines and part else part
    return lines


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A line of heads and one for each row. A head that begins with ">" aligns to the right."""
    names = [head.removeprefix(">") for head in heads]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if head.startswith(">") else cell.ljust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        ).rstrip()
        for row in (names, *rows)
    ]


def count(value: float | None) -> str:
    """1234 is 1,234, and 0.25 stays; - for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def seconds(value: float | None) -> str:
    """0.0123 is 12 ms; - for None."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def span(value_s: float) -> str:
    """An age: 3700 is 1:01:40."""
    return str(timedelta(seconds=int(value_s)))


def _size(value: float) -> str:
    return ByteSize(value).human_readable(separator=" ")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _router(snapshot: Snapshot) -> Iterator[Line]:
    router, load = snapshot.router, snapshot.load
    models = ", ".join(router.models) or "no model yet"
    style = {"ok": "bold", "unavailable": "red"}.get(router.state, "yellow")
    yield Line(
        f"kvrouter {router.version}  {router.state}  {models}  {router.policy}  "
        f"up {span(router.uptime_s)}",
        style,
    )
    for sentence in router.lacking:
        yield Line(sentence, "yellow")
    waiting = f"{load.waiting} of {load.queue_size} waiting"
    if load.waiting_for_engine:
        waiting += f", {load.waiting_for_engine} for an engine"
    yield Line(f"{load.running} of {load.limit} requests in flight, {waiting}")


def _minute(snapshot: Snapshot) -> Iterator[Line]:
    minute = snapshot.minute
    span_s, prompts = minute.span_s or 1.0, minute.prompt_tokens
    rows = [
        ("answered", f"{count(minute.ok / span_s)}/s"),
        ("failed", ", ".join([count(minute.failed), *_kinds(minute)])),
        ("queue wait", _quantiles(minute.queue_p50_s, minute.queue_p95_s)),
        ("tokens out", f"{count(minute.output_tokens / span_s)}/s"),
        ("TTFT", _quantiles(minute.ttft_p50_s, minute.ttft_p95_s)),
        ("TTFT parts", _ttft_parts(snapshot.history.series)),
        ("from engines", f"{_share(minute.engine_tokens, prompts)} of {count(prompts)} tokens"),
        ("from the store", f"{_share(minute.store_tokens, prompts)} of {count(prompts)} tokens"),
    ]
    styles = ["red" if name == "failed" and minute.failed else "" for name, _ in rows]
    yield from _table(("last minute", ""), rows, styles)


def _quantiles(p50_s: float | None, p95_s: float | None) -> str:
    return f"median {seconds(p50_s)}, 95 % {seconds(p95_s)}"


def _kinds(minute: Minute) -> Iterator[str]:
    """What failed: requests by status, legs by reason."""
    yield from (f"{n} x {status}" for status, n in minute.errors.items())
    yield from (f"{n} legs {reason}" for reason, n in minute.upstream_errors.items())


def _ttft_parts(series: dict[str, list[float | None]]) -> str:
    """Mean time of each part, over the answers that began in the last minute."""
    begun = [n or 0.0 for n in series["begun"][-_BUCKETS:]]
    whole = sum(begun)
    if not whole:
        return "-"
    parts = []
    for part in _PARTS:
        values = series[f"ttft_{part}_s"][-_BUCKETS:]
        mean_s = sum(n * (v or 0.0) for n, v in zip(begun, values, strict=True)) / whole
        parts.append(f"{part} {seconds(mean_s)}")
    return ", ".join(parts)


def _engines(engines: Sequence[EngineCard]) -> Iterator[Line]:
    if not engines:
        yield Line("no engine is named yet")
        return
    rows, styles = [], []
    for engine in engines:
        blocked = engine.state == "up" and engine.breaker != "closed"
        state = f"breaker {engine.breaker or 'unknown'}" if blocked else engine.state
        styles.append({"up": "", "draining": "yellow"}.get(state, "red"))
        kind = " ".join(filter(None, (engine.family, engine.version)))
        rows.append(
            (
                f"{engine.label} {engine.id}" if engine.label else engine.id,
                engine.role,
                state,
                str(engine.requests),
                count(engine.tokens),
                engine.index or "-",
                engine.problem or kind,
            )
        )
    yield from _table(
        ("engine", "role", "state", ">legs", ">tokens", "index", "about"), rows, styles
    )


def _flows(snapshot: Snapshot) -> Iterator[Line]:
    flows = sorted(snapshot.flows, key=lambda flow: -flow.tokens)[:MAX_ROWS]
    rows = [
        (f.prefill or "no prefill leg", f.decode, str(f.requests), count(f.tokens)) for f in flows
    ]
    yield from _table(("prefill", "decode", ">requests", ">prompt tokens"), rows)


def _store(store: StoreCard | None) -> Iterator[Line]:
    if store is None:
        return
    if store.connected:
        yield Line(f"store {store.url}", "bold")
    else:
        yield Line(f"store {store.url}  not connected", "red")
    if store.problem:
        yield Line(store.problem, "red")
    rows = [
        (
            tier.name,
            *(
                (_size(tier.used_bytes), _size(tier.size_bytes), count(tier.blocks))
                if tier.size_bytes
                else "---"
            ),
            _share(tier.hits, tier.hits + tier.misses),
            tier.note or "",
        )
        for tier in store.tiers
    ]
    heads = ("tier", ">used", ">size", ">blocks", ">found", "note")
    yield from _table(heads, rows, ["yellow" if tier.note else "" for tier in store.tiers])
    if store.tiers and store.span_s:
        given, put = (_size(n / store.span_s) for n in (store.out_bytes, store.in_bytes))
        yield Line(f"{put}/s put, {given}/s read, {store.leases} leases")


def _requests(snapshot: Snapshot) -> Iterator[Line]:
    requests = snapshot.requests
    shown = requests.shown[:MAX_ROWS]
    rows = [
        (
            r.id,
            r.model,
            r.phase,
            f"{r.prefill or '-'} > {r.decode or '-'}",
            span(r.age_s),
            count(r.tokens),
        )
        for r in shown
    ]
    yield from _table(("request", "model", "phase", "engines", ">age", ">tokens"), rows)
    if requests.total > len(shown):
        yield Line(f"and {requests.total - len(shown)} more")


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> Iterator[Line]:
    """A table with a bold head; nothing without rows."""
    if rows:
        first, *others = table(heads, rows)
        yield Line(first, "bold")
        yield from map(Line, others, styles or [""] * len(others))
