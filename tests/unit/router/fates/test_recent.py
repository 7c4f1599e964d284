"""Ladders of recent requests, and the story of one."""

import json
import re
from typing import Any

from kvrouter.fates.fate import Fate
from kvrouter.fates.recent import KEPT, WINDOW_S, Recent, headline, in_order
from kvrouter.fates.split import Evidence
from kvrouter.openai.request import parse
from kvrouter.telemetry.request_log import RequestLine

NOW_S = 1e9
REQUEST = parse(json.dumps({"model": "m", "prompt": "x"}).encode(), "completion", 1)


def recent(*lines: tuple[RequestLine, str]) -> Recent:
    found = Recent("x-mine")
    for line, session in lines:
        found.add(line, REQUEST, {"x-mine": session}, [Evidence(prompt=100)])
    return found


def line(request_id: str = "a", at_s: float = NOW_S, **more: Any) -> RequestLine:
    values = {"fates": {"engine": 60, "evicted_store": 40}, "model": "m", **more}
    return RequestLine(request_id, time=at_s, **values)


def requests(ladder: str) -> int:
    found = re.search(r"^([\d,]+) requests of the last", ladder, re.M)
    assert found is not None
    return int(found[1].replace(",", ""))


def test_a_ladder_adds_up_the_requests_of_the_last_minutes() -> None:
    found = recent((line(), "s"), (line(at_s=NOW_S - 10), "s"))
    ladder = found.ladder(NOW_S)
    assert "\n2 requests of the last 10 s\n" in ladder
    assert re.search(r"^ +200 prompt tokens$", ladder, re.M)
    rows = re.findall(r"^ +(\d+) +([\d.]+%) +(.+)$", ladder, re.M)
    assert rows == [
        ("120", "60.0%", Fate.ENGINE.words),
        ("80", "40.0%", Fate.EVICTED_STORE.words),
    ]
    assert requests(found.ladder(NOW_S + WINDOW_S + 1)) == 0


def test_a_ladder_says_what_to_do_about_each_loss() -> None:
    ladder = recent((line(), "s")).ladder(NOW_S).splitlines()
    assert ladder[0].startswith("Largest avoidable loss of prompt tokens: 40.0% evicted by the sto")
    assert ladder[1] == f"  -> {Fate.EVICTED_STORE.words}: {Fate.EVICTED_STORE.remedy}"


def test_a_ladder_is_of_one_model_key_or_session() -> None:
    found = recent(
        (line(model="chat", version="m-1"), "one"),
        (line(model="other", key="batch"), "two"),
    )
    models = [requests(found.ladder(NOW_S, model=name)) for name in ("chat", "m-1", "x")]
    assert models == [1, 1, 0]
    assert requests(found.ladder(NOW_S, key="batch")) == 1
    assert requests(found.ladder(NOW_S, session="one")) == 1
    assert requests(found.ladder(NOW_S, key="batch", session="one")) == 0


def test_the_headline_names_the_largest_losses_first() -> None:
    told = headline({Fate.ENGINE: 500, Fate.OTHER_SALT: 200, Fate.LANDED_LATE: 290, Fate.TAIL: 10})
    assert told.startswith("Largest avoidable loss of prompt tokens: 29.0% landed too late")
    assert told.index("landed too late") < told.index("another cache_salt")
    assert "whole block" not in told  # one in a hundred is not worth it


def test_without_a_loss_the_headline_says_so() -> None:
    told = headline({Fate.ENGINE: 50, Fate.FIRST_USE: 50})
    assert told == "No avoidable loss of 2%: 50.0% reused, 50.0% first uses."
    assert headline({}) == "No request with a prompt has ended lately."


def test_what_was_reused_stands_before_what_was_computed() -> None:
    found = in_order({Fate.FIRST_USE: 90, Fate.STORE: 4, Fate.ENGINE: 6, Fate.TAIL: 0})
    assert list(found) == [Fate.ENGINE, Fate.STORE, Fate.FIRST_USE]


def test_the_story_of_a_request_tells_its_steps_in_order() -> None:
    told = line(
        prefill="p:1", decode="d:1", plan="prefill", landed_blocks=6, nothing_landed="timeout"
    )
    found = Recent(None)
    known = Evidence(prompt=100, by_prefill=True, loaded=40, own=16, store=32, seen=96)
    found.add(told, REQUEST, {}, [known])
    story = found.story("a")
    assert story is not None
    steps = dict(re.findall(r"^(prompt|match|plan|landing|load|report) +(.+)$", story, re.M))
    assert list(steps) == ["prompt", "match", "plan", "landing", "load", "report"]
    assert "earlier requests had 96" in steps["prompt"]
    assert "p:1 held 16" in steps["match"]
    assert "prefill on p:1, decode on d:1" in steps["plan"]
    assert "timeout" in steps["landing"]
    assert "d:1 had 40 tokens" in steps["load"]
    assert steps["report"] == "p:1 does not say"
    assert found.story("b") is None


def test_only_the_last_requests_are_kept() -> None:
    found = recent(*((line(str(number)), "s") for number in range(KEPT + 1)))
    assert found.story("0") is None
    assert requests(found.ladder(NOW_S)) == KEPT
