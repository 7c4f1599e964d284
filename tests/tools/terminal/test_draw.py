"""What `kvrouter status` writes, from a document."""

import re

import pytest

from kvrouter.control.page.model import (
    SCHEMA,
    EngineCard,
    FlowCard,
    History,
    Load,
    Minute,
    ModelCard,
    RequestCard,
    RequestList,
    RouterCard,
    Snapshot,
    StoreCard,
    TierCard,
)
from kvrouter.control.page.snapshot import SERIES
from kvrouter.tools.terminal.draw import Line, count, screen, seconds, span, table


def engine(name: str, role: str, **more: object) -> EngineCard:
    facts: dict[str, object] = {
        "id": name, "label": None, "role": role, "state": "up", "down": False,
        "breaker": "closed", "requests": 3, "tokens": 4096, "busy": 0.5, "index": "exact",
        "family": "store", "version": "0.32.0",
        "block_tokens": 64, "models": ["m"], "ranks": [], "problem": None, **more,
    }  # fmt: skip
    return EngineCard(**facts)  # type: ignore[arg-type]


def document(**more: object) -> Snapshot:
    facts: dict[str, object] = {
        "schema": SCHEMA,
        "time_s": 1e9,
        "router": RouterCard("0.1.0", "ok", [], ["m"], "prefix", 1e9 - 3700, 3700.0),
        "load": Load(5, 4096, 2, 0, 100),
        "minute": Minute(
            60.0, 120, 0, 6000, 1500, 3000, 2400, 0.120, 0.480,
            0.0, 0.010, {"429": 3}, {"timeout": 2},
        ),
        "models": [ModelCard("m", 2, 5, 0, 120, 0, 2400, 0.150)],
        "events": [],
        "engines": [engine("10.0.0.1:8000", "prefill"), engine("10.0.0.2:8000", "decode")],
        "flows": [FlowCard("10.0.0.1:8000", "10.0.0.2:8000", 40, 4000)],
        "history": History(5.0, 1e9, {name: [1.0, None, 3.0] for name in SERIES}),
        "requests": RequestList(
            1, None, [RequestCard(1, "req-1", "m", "stream", "p:1", "d:1", 2.5, 100, 17)]
        ),
        "store": StoreCard(
            "kv://s:7400", True, 0.5, None,
            [TierCard("memory", 1 << 30, 1 << 29, 100, 9, 1, 0)], 2, {"shm": 2}, 60.0, 600, 1200,
        ),
        **more,
    }  # fmt: skip
    return Snapshot(**facts)  # type: ignore[arg-type]


def shown(width: int = 120, *, colours: bool = False, **more: object) -> str:
    return "\n".join(line.shown(width, colours=colours) for line in screen(document(**more)))


def test_everything_that_matters_is_there() -> None:
    text = shown()
    for part in (
        "ok", "prefix", "up 1:01:40", "5 of 4096 requests in flight, 2 of 100 waiting", "2/s",
        "40/s", "120 ms, 95 % 480 ms", "0, 3 x 429, 2 legs timeout", "0 ms, 95 % 10 ms",
        "prefill 2.50 s", "25.0% of 6,000", "50.0% of 6,000", "10.0.0.1:8000",
        "exact", "store 0.32.0", "512.0 MiB", "1.0 GiB", "90.0%", "req-1",
        "stream",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_lines_keep_within_the_terminal(width: int) -> None:
    text = shown(width, engines=[engine("a" * 90, "decode")])
    assert "a" * min(90, width) in text
    assert all(len(line) <= width for line in text.splitlines())


def test_an_engine_that_is_away_says_why() -> None:
    gone = engine("d:1", "decode", state="away", breaker=None, problem="/health: refused")
    assert re.search(r"d:1 +decode +away .*/health: refused", shown(engines=[gone]))


def test_an_open_breaker_stands_in_place_of_up() -> None:
    assert "breaker open" in shown(engines=[engine("d:1", "decode", breaker="open")])


def test_what_others_named_cannot_move_the_cursor() -> None:
    evil = "\x1b[2Jevil\x07\n"
    request = RequestCard(1, evil, evil, "plan", evil, None, 1.0, None, 0)
    text = shown(
        requests=RequestList(1, None, [request]),
        engines=[engine(evil, "decode", problem=evil)],
        flows=[FlowCard(evil, evil, 1, 1)],
        router=RouterCard("0.1.0", "degraded", [evil], [evil], "prefix", 0.0, 1.0),
    )
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil" in text


def test_colours_are_there_only_where_they_are_wanted() -> None:
    assert "\x1b[" in shown(colours=True)
    assert "\x1b[" not in shown()


def test_a_tier_below_a_node_has_hits_and_no_size() -> None:
    tiers = [TierCard("remote", 0, 0, 0, 3, 1, 0, "away: redis://a:1")]
    text = shown(stores=[StoreCard("kv://a:7400", True, 0.5, None, tiers, 0, {}, 60.0, 0, 0)])
    (row,) = [line for line in text.splitlines() if line.startswith("remote")]
    assert row.split() == ["remote", "-", "-", "-", "75.0%", "away:", "redis://a:1"]


def test_every_node_of_the_store_is_there() -> None:
    nodes = [
        StoreCard(url, at == 0, None, None, [], 0, {}, 0.0, 0, 0)
        for at, url in enumerate(("kv://a:7400", "kv://b:7400"))
    ]
    text = shown(store=nodes[0], stores=nodes)
    assert text.count("kv://a:7400") == 1
    assert "store kv://b:7400  not connected" in text


def test_without_store_engines_or_requests_nothing_is_made_up() -> None:
    text = shown(store=None, engines=[], flows=[], requests=RequestList(0, None, []))
    assert "no engine is named yet" in text
    assert "kv://" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1,000"),
        (0.25, "0.25"),
        (12345.6, "12,346"),
        (2.5e6, "2,500,000"),
    ],
)
def test_counts_have_separators(value: float | None, text: str) -> None:
    assert count(value) == text


def test_times_have_their_units() -> None:
    assert [seconds(v) for v in (None, 0.0012, 0.5, 1.5, 30.0)] == [
        "-", "1 ms", "500 ms", "1.50 s", "30.00 s",
    ]  # fmt: skip
    assert [span(v) for v in (7.9, 3700, 90000)] == ["0:00:07", "1:01:40", "1 day, 1:00:00"]


def test_columns_of_numbers_align_to_the_right() -> None:
    assert table(("name", ">n"), [("a", "1"), ("longer", "100")]) == [
        "name      n",
        "a         1",
        "longer  100",
    ]
    assert Line("abcdef", "red").shown(4, colours=True) == "\x1b[31mabcd\x1b[0m"


def test_an_engine_with_a_label_is_shown_by_it_too() -> None:
    assert re.search(
        r"^rack1-a d:1 +decode", shown(engines=[engine("d:1", "decode", label="rack1-a")]), re.M
    )
