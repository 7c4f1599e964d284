"""The document as lines of text. Pure: what is printed where is `run`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.tools.terminal.words import (
    Paint,
    bar,
    count,
    percent,
    plain,
    seconds,
    size,
    span,
    spark,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrouter.control.page.model import EngineCard, History, Snapshot, StoreCard

LEAST_WIDTH: Final = 60
MOST_REQUESTS: Final = 10
_LABEL: Final = 18
_FIGURES: Final = 24
_MINUTE: Final = 12
_STATES: Final = {
    "ok": "green",
    "degraded": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "unavailable": "red",
}
_PARTS: Final = ("queue", "tokenise", "plan", "prefill", "landing", "decode")


def screen(snapshot: Snapshot, width: int, paint: Paint) -> list[str]:
    """All of it, in lines of at most `width` cells."""
    width = max(LEAST_WIDTH, width)
    parts = (
        _head(snapshot, paint),
        _figures(snapshot, width, paint),
        _engines(snapshot.engines, width, paint),
        _flows(snapshot, width, paint),
        _store(snapshot.store, snapshot.minute.span_s, paint),
        _requests(snapshot, width, paint),
    )
    lines: list[str] = []
    for part in parts:
        shown = list(part)
        if shown and lines:
            lines.append("")
        lines += shown
    return lines


def _head(snapshot: Snapshot, paint: Paint) -> Iterator[str]:
    router, load = snapshot.router, snapshot.load
    state = paint(router.state, "bold", _STATES.get(router.state, "red"))
    models = plain(", ".join(router.models)) or "no model yet"
    yield (
        f"{paint('kvrouter', 'bold')} {router.version}  {state}  {models}  "
        f"{router.policy}  up {span(router.uptime_s)}"
    )
    for sentence in router.lacking:
        yield paint(plain(sentence), "yellow")
    waiting = f"{load.waiting} of {load.queue_size} waiting"
    if load.waiting_for_engine:
        waiting += f", {load.waiting_for_engine} for an engine"
    yield f"{load.running} of {load.limit} requests under way, {waiting}"


def _figures(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    minute, series = snapshot.minute, snapshot.history.series
    span_s, prompts = minute.span_s or 1.0, minute.prompt_tokens
    room = max(0, width - _LABEL - _FIGURES - 2)

    def line(name: str, figures: str, values: Sequence[float | None], *styles: str) -> str:
        return f"{name:<{_LABEL}}{figures:<{_FIGURES}}  {paint(spark(values, room), *styles)}"

    failed = paint(f", {minute.failed} failed", "red") if minute.failed else ""
    yield paint("last minute", "bold")
    yield line("answered", f"{count(minute.ok / span_s)}/s", series["ok"], "green") + failed
    yield line(
        "tokens out", f"{count(minute.output_tokens / span_s)}/s", series["output_tokens"], "blue"
    )
    ttft = f"{seconds(minute.ttft_p50_s)}, 95 % {seconds(minute.ttft_p95_s)}"
    yield line("TTFT median", ttft, series["ttft_mean_s"], "yellow")
    for name, tokens, key, style in (
        ("from engines", minute.engine_tokens, "engine_tokens", "cyan"),
        ("from the store", minute.store_tokens, "store_tokens", "magenta"),
    ):
        share = percent(tokens / prompts if prompts else None)
        yield line(name, f"{share} of {count(prompts)}", series[key], style)
    means = _part_means(snapshot.history)
    if means:
        yield "TTFT parts        " + "  ".join(f"{name} {seconds(means[name])}" for name in means)


def _part_means(history: History) -> dict[str, float]:
    """Mean seconds of each part, of the answers begun in the last minute."""
    begun = [n or 0.0 for n in history.series["begun"][-_MINUTE:]]
    if not sum(begun):
        return {}
    means = {}
    for part in _PARTS:
        values = history.series[f"ttft_{part}_s"][-_MINUTE:]
        whole = sum((v or 0.0) * n for v, n in zip(values, begun, strict=True))
        means[part] = whole / sum(begun)
    return means


def _engines(engines: Sequence[EngineCard], width: int, paint: Paint) -> Iterator[str]:
    if not engines:
        yield "no engine is named yet"
        return
    most = max(1, *(engine.tokens for engine in engines), 1)
    rows = []
    for engine in engines:
        state = _state(engine, paint)
        said = " ".join(filter(None, (engine.family, engine.version)))
        rows.append(
            (
                plain(engine.id),
                engine.role,
                state,
                str(engine.requests),
                count(engine.tokens),
                bar(engine.tokens / most, 10),
                engine.index or "-",
                paint(plain(engine.problem), "red") if engine.problem else plain(said),
            )
        )
    heads = ("engine", "role", "state", ">legs", ">tokens", "load", "index", "")
    first, *others = table(heads, rows, width)
    yield paint(first, "bold")
    yield from others


def _state(engine: EngineCard, paint: Paint) -> str:
    if engine.state == "up" and engine.breaker != "closed":
        return paint(f"breaker {engine.breaker or 'unknown'}", "red")
    styles = {"up": "green", "draining": "yellow"}
    return paint(engine.state, styles.get(engine.state, "red"))


def _flows(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    if not snapshot.flows:
        return
    flows = sorted(snapshot.flows, key=lambda flow: -flow.tokens)[:MOST_REQUESTS]
    rows = [
        (plain(f.prefill or "no prefill leg"), plain(f.decode), str(f.requests), count(f.tokens))
        for f in flows
    ]
    first, *others = table(("prefill", "decode", ">requests", ">prompt tokens"), rows, width)
    yield paint(first, "bold")
    yield from others


def _store(store: StoreCard | None, span_s: float, paint: Paint) -> Iterator[str]:
    if store is None:
        return
    state = "" if store.connected else paint("  not connected", "red")
    yield f"{paint('store', 'bold')} {plain(store.url)}{state}"
    if store.problem:
        yield paint(plain(store.problem), "red")
    for tier in store.tiers:
        share = tier.used_bytes / tier.size_bytes if tier.size_bytes else 0.0
        used = f"{size(tier.used_bytes)} of {size(tier.size_bytes)}"
        asked = tier.hits + tier.misses
        found = f", {percent(tier.hits / asked)} of {count(asked)} found" if asked else ""
        note = paint(f"  {plain(tier.note)}", "yellow") if tier.note else ""
        yield f"{tier.name:<8}{bar(share, 20)}  {used}, {count(tier.blocks)} blocks{found}{note}"
    if store.tiers and span_s:
        rates = f"{size(store.in_bytes / span_s)}/s put, {size(store.out_bytes / span_s)}/s given"
        yield f"{rates}, {store.leases} leases"


def _requests(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    requests = snapshot.requests
    if not requests.total:
        return
    shown = requests.shown[:MOST_REQUESTS]
    rows = [
        (
            plain(r.id),
            plain(r.model),
            r.phase,
            plain(f"{r.prefill or '-'} > {r.decode or '-'}"),
            span(r.age_s),
            count(r.tokens),
        )
        for r in shown
    ]
    first, *others = table(("request", "model", "phase", "engines", ">age", ">tokens"), rows, width)
    yield paint(first, "bold")
    yield from others
    if requests.total > len(shown):
        yield f"and {requests.total - len(shown)} more"
