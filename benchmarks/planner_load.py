"""Requests for the planner benchmark: conversations in bursts. Pure: a seed determines them.

For a quarter of each cycle the rate is high, for the rest of it low. A prompt begins with one of a
few system prompts, or continues an earlier one.
"""

import random
from dataclasses import dataclass

BURST, CYCLE_S, BURST_S = 3.0, 10.0, 2.5
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 512
FOLLOWS, OPEN_SESSIONS, THINKS_S = 0.5, 20, 2.0
NEW_TOKENS, NEW_SPREAD = 1100, 0.9  # median and sigma of a lognormal
SAID_TOKENS, SAID_SPREAD = 70, 0.6
MOST_PROMPT_TOKENS, MOST_ANSWER_TOKENS = 12_000, 400
TOKEN_IDS = (1000, 30_000)


@dataclass(frozen=True)
class Ask:
    """One request: its time, its prompt, and the length of its answer."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    missing: int  # prompt tokens that no earlier prompt began with


@dataclass
class _Session:
    prompt: tuple[int, ...]
    said: int
    at: float


def arrivals(chance: random.Random, count: int, per_s: float) -> list[float]:
    """Times of `count` requests, on average `per_s` of them over whole cycles."""
    quiet = (CYCLE_S - BURST * BURST_S) / (CYCLE_S - BURST_S)
    times: list[float] = []
    now_s = 0.0
    while len(times) < count:
        now_s += chance.expovariate(BURST * per_s)
        share = 1.0 if now_s % CYCLE_S < BURST_S else quiet / BURST
        if chance.random() < share:
            times.append(now_s)
    return times


def requests(seed: int, seconds: float, per_s: float) -> list[Ask]:
    """The requests of so many seconds."""
    chance = random.Random(seed)
    systems = [_ids(chance, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    seen: set[tuple[int, ...]] = set()
    sessions: list[_Session] = []
    asks = []
    for at_s in arrivals(chance, round(seconds * per_s), per_s):
        ready = [each for each in sessions[-OPEN_SESSIONS:] if each.at + THINKS_S < at_s]
        new = _ids(chance, _size(chance, NEW_TOKENS, NEW_SPREAD))
        before: tuple[int, ...]
        if ready and chance.random() < FOLLOWS:
            session = chance.choice(ready)
            sessions.remove(session)
            before = session.prompt
            prompt = before + _ids(chance, session.said) + new
            held = len(before)
        else:
            before = chance.choice(systems)
            prompt, held = before + new, len(before) if before in seen else 0
            seen.add(before)
        prompt = prompt[:MOST_PROMPT_TOKENS]
        said = min(_size(chance, SAID_TOKENS, SAID_SPREAD), MOST_ANSWER_TOKENS)
        sessions.append(_Session(prompt, said, at_s))
        asks.append(Ask(at_s, prompt, said, max(1, len(prompt) - held)))
    return asks


def rate_of_load(share: float, engines: int, seconds_per_token: float) -> float:
    """Requests per second that keep that many prefill engines busy for a share of the time."""
    sample = requests(0, 2000.0, 1.0)
    mean_s = seconds_per_token * sum(ask.missing for ask in sample) / len(sample)
    return share * engines / mean_s


def _size(chance: random.Random, median: int, spread: float) -> int:
    return max(1, round(median * chance.lognormvariate(0.0, spread)))


def _ids(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(*TOKEN_IDS) for _ in range(count))
