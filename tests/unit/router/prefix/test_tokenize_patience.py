"""How long a request waits for its token ids: a part of a first token, and not for who was late."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.router.conftest import Clock

from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.tokenize import (
    INLINE_CHARACTERS,
    LEAST_S,
    LONGEST_PAUSE_S,
    MOST_S,
    TRIAL_S,
    LocalTokenizer,
    QuickEngines,
    TokenSource,
    patience_s,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

ONE, OTHER = Engine("one:1", Role.DECODE), Engine("other:1", Role.DECODE)
SOON_S = 0.02
BODY = orjson.dumps({"prompt": "a b"})
IDS = [7, 8]


class Engines:
    """Engines that answer when a test lets them."""

    def __init__(self, clock: Clock, *slow: Engine) -> None:
        self.clock = clock
        self.slow = slow
        self.asked: list[Engine] = []
        self.lets_go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, engine: Engine, path: str, body: bytes, deadline_s: float) -> bytes:
        del body
        self.asked.append(engine)
        if engine in self.slow and not self.lets_go.is_set():
            if deadline_s < TRIAL_S:  # a request's: it has passed
                self.clock.pass_s(deadline_s)
                raise TimeoutError
            await self.lets_go.wait()
        if self.error is not None:
            raise self.error
        return orjson.dumps({"tokens" if path == "/tokenize" else "token_ids": IDS})


async def ask(source: TokenSource, *engines: Engine, body: bytes = BODY) -> Sequence[int] | None:
    found = await source.tokens(engines, "m", body, None)
    return orjson.loads(found.json) if found is not None else None


def short(*slow: Engine) -> tuple[TokenSource, Engines]:
    engines = Engines(Clock(), *slow)
    return TokenSource(engines, patience=lambda _: SOON_S, clock=engines.clock), engines


def test_a_request_waits_for_a_part_of_the_time_to_compute_its_prompt() -> None:
    assert patience_s(0) == LEAST_S
    for tokens in (1000, 10_000, 100_000, 1_000_000):
        assert LEAST_S <= patience_s(4 * tokens) <= min(MOST_S, LEAST_S + 0.1 * tokens / 10_000)


async def test_an_engine_that_was_late_is_not_waited_for_again() -> None:
    source, engines = short(ONE)
    assert await ask(source, ONE) is None
    for number in range(5):
        assert await ask(source, ONE, body=b"%d" % number) is None
    await asyncio.sleep(0)
    assert engines.asked == [ONE, ONE], "and once more for nobody, so that its answer is not lost"
    assert source.counts == {"late": 6}


async def test_another_engine_is_asked_where_one_is_slow() -> None:
    source, engines = short(ONE)
    for number in range(5):
        assert await ask(source, OTHER, ONE, body=b"%d" % number) == IDS
    await asyncio.sleep(0)
    assert engines.asked.count(ONE) == 2
    assert source.counts == {"engine": 5}


async def test_a_late_answer_is_remembered() -> None:
    source, engines = short(ONE)
    assert await ask(source, ONE) is None
    engines.lets_go.set()
    while await ask(source, ONE) is None:
        await asyncio.sleep(0)
    assert engines.asked == [ONE, ONE]
    assert source.counts["cache_hits"] == 1


async def test_an_engine_that_is_quick_again_is_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    source, engines = short(ONE)
    assert await ask(source, ONE) is None
    engines.lets_go.set()
    engines.clock.pass_s(LONGEST_PAUSE_S)
    assert await ask(source, ONE, body=b"trial") is None, "a trial keeps nobody waiting"
    while await ask(source, ONE, body=b"next") is None:
        await asyncio.sleep(0)
    assert [each.message.partition(" ")[2][:9] for each in caplog.records] == [
        "took more",
        "tokenises",
    ]


async def test_what_an_engine_renders_is_awaited_no_longer() -> None:
    source, engines = short(ONE)
    assert await source.rendered([ONE], "/render", BODY) is None
    assert await source.rendered([ONE], "/render", BODY) is None
    await asyncio.sleep(0)
    assert engines.asked == [ONE, ONE]
    assert (await source.rendered([ONE, OTHER], "/render", BODY)) is not None


async def test_an_engine_that_fails_at_once_is_not_late() -> None:
    source, engines = short()
    engines.error = OSError("gone")
    for _ in range(3):
        assert await ask(source, ONE) is None
    assert engines.asked == [ONE] * 3
    assert source.counts == {"failed": 3}


async def test_a_source_that_ends_leaves_no_question_behind() -> None:
    before = asyncio.all_tasks()
    source, _ = short(ONE)
    await ask(source, ONE)
    source.close()
    while asyncio.all_tasks() != before:
        await asyncio.sleep(0)


class HeldTokenizer(LocalTokenizer):
    """Takes as long as a test wants."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.lets_go = asyncio.Event()
        self.encoded: list[str] = []

    def encode(self, text: str) -> array[int]:
        if len(text) > INLINE_CHARACTERS:
            self.encoded.append(text)
            waiting: Any = self.lets_go.wait()
            asyncio.run_coroutine_threadsafe(waiting, self._loop).result()
        return array("I", IDS)


async def test_a_local_tokenizer_that_is_slow_is_not_waited_for_and_its_work_is_kept() -> None:
    local = HeldTokenizer(asyncio.get_running_loop())
    source = TokenSource(Engines(Clock()), local, patience=lambda _: SOON_S)
    text = "a" * (INLINE_CHARACTERS + 1)
    assert await source.tokens([ONE], "m", BODY, text) is None
    assert await source.tokens([ONE], "m", BODY, text) is None
    assert (await source.tokens([ONE], "m", b"short", "a b")) is not None
    assert (source.counts["late"], source.counts["local"]) == (2, 1)
    local.lets_go.set()
    while (await source.tokens([ONE], "m", BODY, text)) is None:
        await asyncio.sleep(0)
    assert local.encoded == [text]
    source.close()


class Pauses(RuleBasedStateMachine):
    """One engine that is asked, is late and answers, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.quick = QuickEngines(self.clock)
        self.late_since: float | None = None
        self.tried = False
        self.failures = 0

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @rule()
    def it_is_late(self) -> None:
        was_quick = self.late_since is None
        assert self.quick.was_late(ONE) is was_quick
        if was_quick or self.tried:
            self.late_since, self.tried = self.clock(), False
            self.failures += 1

    @rule()
    def it_answers(self) -> None:
        assert self.quick.was_quick(ONE) is self.tried
        if self.tried:
            self.late_since, self.tried, self.failures = None, False, 0

    @rule()
    def it_is_tried(self) -> None:
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** max(1, self.failures))
        due = self.late_since is not None and self.clock() >= self.late_since + pause_s
        found = self.quick.trial([OTHER, ONE])
        assert (found is ONE) is (due and not self.tried)
        self.tried = self.tried or found is ONE

    @invariant()
    def it_is_waited_for_unless_it_was_late(self) -> None:
        expected = [ONE, OTHER] if self.late_since is None else [OTHER]
        assert list(self.quick.of([ONE, OTHER])) == expected


TestPauses = Pauses.TestCase
