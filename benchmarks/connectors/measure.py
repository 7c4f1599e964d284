"""The three parts: hits in a store, prompts without hits, and cold prompts over two engines.

In each part the set-ups answer the same prompt one after the other, and in the reverse order for
the next prompt (A B, B A, ...). One request runs at a time.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tests.vllm.engines import Engine, EngineFailed

from benchmarks.connectors.judge import FLOOR, Times
from benchmarks.connectors.peers import PEERS
from benchmarks.connectors.rig import BLOCK_TOKENS, KV_TOKEN_BYTES, Answer, Setup
from benchmarks.offloading.rig import prompts


class NotFound(EngineFailed):
    """KV did not come from where it should; the message holds where it came from."""


@dataclass(frozen=True)
class Plan:
    """How much is measured: prompts asked again in each round of hits, and new ones of a round."""

    rounds: int
    prompts: int
    new_prompts: int
    prompt_tokens: int

    @property
    def reused_tokens(self) -> int:
        """The tokens in whole blocks: those that can be loaded."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def drawn(self, what: str, count: int) -> list[list[int]]:
        """New prompts, the same in every run of the benchmark."""
        return prompts(what, count, self.prompt_tokens)


@dataclass
class Record:
    """All that was measured, and what a reader of the figures must know."""

    times: Times = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    different: int = 0  # prompts whose tokens are not equal in all set-ups
    misses: dict[str, int] = field(default_factory=dict)  # set-up -> prompts that it did not find
    skipped: dict[str, str] = field(default_factory=dict)  # peer -> reason
    idle_share: dict[str, float] = field(default_factory=dict)  # engine -> of one core

    def add(self, part: str, answers: dict[str, Answer]) -> None:
        """One prompt's answers by set-up."""
        for name, answer in answers.items():
            self.times.setdefault(part, {}).setdefault(name, []).append(answer.ttft_s)
            self.rows.append({"part": part, "setup": name} | asdict(answer))
        tokens = [answer.tokens for answer in answers.values()]
        self.different += any(one != tokens[0] for one in tokens)

    def skip(self, name: str, error: Exception) -> None:
        """Note why a peer does not run (on), and drop its times."""
        print(f"{name} is skipped: {error}", file=sys.stderr, flush=True)
        self.skipped[name] = str(error).splitlines()[0]
        for setups in self.times.values():
            setups.pop(name, None)


def compute(plan: Plan, setup: Setup) -> None:
    """Let a set-up compute and keep the prompts of `hits`."""
    for prompt in plan.drawn("hits", plan.prompts):
        setup.ask(prompt, setup.engines)


def hits(plan: Plan, setups: Sequence[Setup], record: Record) -> None:
    """Prompts that each engine has computed before. One pass without measurement comes first."""
    asked = plan.drawn("hits", plan.prompts)
    engines = _engines(setups)
    for number in range(plan.rounds + 1):
        for turn, prompt in enumerate(asked, number):
            ask = partial(_found, plan, record, engines, prompt)
            answers = _in_turn(setups, turn, record, ask)
            if number:
                record.add("hit", answers)
        print(f"hit: {number} of {plan.rounds} rounds", flush=True)


def _in_turn(
    setups: Sequence[Setup], turn: int, record: Record, ask: Callable[[Setup], Answer]
) -> dict[str, Answer]:
    """The answers of all set-ups to one prompt. A peer that fails is not asked again."""
    answers = {}
    for setup in setups if turn % 2 == 0 else setups[::-1]:
        if setup.name not in record.skipped:
            try:
                answers[setup.name] = ask(setup)
            except (EngineFailed, OSError) as error:
                if setup.name not in PEERS:
                    raise
                record.skip(setup.name, error)
    return answers


def _found(
    plan: Plan, record: Record, engines: Sequence[Engine], prompt: list[int], setup: Setup
) -> Answer:
    """A hit. A prompt that is not found is computed by that, counted, and asked once more."""
    try:
        return _hit(plan, setup, prompt, engines)
    except NotFound as error:
        print(f"not found: {error}", file=sys.stderr, flush=True)
        record.misses[setup.name] = record.misses.get(setup.name, 0) + 1
        return _hit(plan, setup, prompt, engines)


def _hit(plan: Plan, setup: Setup, prompt: list[int], engines: Sequence[Engine]) -> Answer:
    own = setup.name == FLOOR
    if not own:
        setup.forget()
    before = setup.bytes_read()
    answer = setup.ask(prompt, engines)
    _check(setup, answer, "local_cache_hit", plan.reused_tokens if own else 0)
    _check(setup, answer, "external_kv_transfer", 0 if own else plan.reused_tokens)
    if setup.store is not None:
        _check_read(setup, setup.bytes_read() - before, plan.reused_tokens)
    return answer


def _check_read(setup: Setup, read: int, tokens: int) -> None:
    """The host memory of the engine must not have served what counts as a hit in the store."""
    if read < tokens * KV_TOKEN_BYTES:
        raise NotFound(f"{setup.name}: only {read} bytes of {tokens} tokens are of the store")


def cold(
    part: str, plan: Plan, setups: Sequence[Setup], record: Record, loaded: Callable[[str], int]
) -> None:
    """New prompts. `loaded`: how many tokens of a prompt must at least come over a connector.

    One prompt without measurement comes first.
    """
    asked = plan.drawn(part, 1 + plan.rounds * plan.new_prompts)
    engines = _engines(setups)
    for turn, prompt in enumerate(asked):
        ask = partial(_new, engines, prompt, loaded)
        answers = _in_turn(setups, turn, record, ask)
        if turn:
            record.add(part, answers)
        if turn % plan.new_prompts == 0:
            print(f"{part}: {turn // plan.new_prompts} of {plan.rounds} rounds", flush=True)


def _new(
    engines: Sequence[Engine], prompt: list[int], loaded: Callable[[str], int], setup: Setup
) -> Answer:
    answer = setup.ask(prompt, engines)
    _check(setup, answer, "local_cache_hit", 0)
    _check(setup, answer, "external_kv_transfer", loaded(setup.name))
    return answer


def _engines(setups: Sequence[Setup]) -> list[Engine]:
    return [engine for setup in setups if not setup.spins for engine in setup.engines]


def _check(setup: Setup, answer: Answer, source: str, tokens: int) -> None:
    """Tokens from a source: none if `tokens` is 0, otherwise at least so many."""
    found = answer.sources.get(source, 0)
    if found < tokens or (found and not tokens):
        raise NotFound(
            f"{setup.name}: {found} prompt tokens are of {source}, not {tokens}: {answer.sources}"
        )
