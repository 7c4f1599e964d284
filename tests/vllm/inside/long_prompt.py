"""Prompts of 32,000 tokens in small blocks, computed, then loaded; run by vLLM's python.

long_prompt.py MODEL URL: prints a JSON object: blocks loaded of each prompt, and ms of processor
time that all calls of schedule() take for it: without a connector that finds or keeps anything
("miss"), computed ("unknown") and loaded ("known").
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from tests.vllm.inside.groups import Kind, full
from tests.vllm.inside.scheduled import Engine
from vllm.v1.kv_offload.base import LookupResult

TOKENS, BLOCK, PROMPTS, STEP_TOKENS = 32_000, 16, 10, 8192
KIND = Kind((replace(full(), block_size=BLOCK, num_kv_heads=1, page_size_padded=None),))


def engine(model: str, url: str) -> Engine:
    """An engine with room for one prompt."""
    return Engine(
        KIND,
        model,
        TOKENS // BLOCK + 100,
        {"url": url, "model": "long", "weights_revision": "none", "cpu_bytes_to_use": 64 << 20},
        longest=TOKENS + 1000,
        step_tokens=STEP_TOKENS,
    )


def engine_without(model: str, url: str) -> Engine:
    """One whose connector finds nothing, and keeps nothing."""
    made = engine(model, url)
    manager = made.connector.scheduler.manager
    manager.lookup = lambda *_, **__: LookupResult.MISS
    manager.prepare_store = lambda *_: None
    made.connector._asks = lambda *_: False
    return made


def scheduled_ms(engine: Engine, prompt: Sequence[int]) -> float:
    """Milliseconds that schedule() computes, until nothing is left to do."""
    spent_s, schedule = [], engine.scheduler.schedule

    def timed() -> Any:
        begun_s = time.thread_time()
        output = schedule()
        spent_s.append(time.thread_time() - begun_s)
        return output

    engine.scheduler.schedule = timed
    engine.ask(prompt)
    while not engine.idle:
        engine.step()
    engine.scheduler.schedule = schedule
    return 1e3 * sum(spent_s)


def main() -> None:
    """Ask."""
    model, url = sys.argv[1:]
    sharing, alone = engine(model, url), engine_without(model, url)
    took_ms: dict[str, list[float]] = {"miss": [], "unknown": [], "known": []}
    blocks = []
    for number in range(PROMPTS):
        prompt = [number, *range(TOKENS)]
        took_ms["miss"].append(scheduled_ms(alone, prompt))
        took_ms["unknown"].append(scheduled_ms(sharing, prompt))
        sharing.forget()
        before = sharing.loaded[0]
        took_ms["known"].append(scheduled_ms(sharing, prompt))
        blocks.append(sharing.loaded[0] - before)
    sharing.close()
    alone.close()
    print(
        json.dumps(
            {"blocks": blocks, "failed": sharing.failed}
            | {name: round(median(each), 1) for name, each in took_ms.items()}
        )
    )


if __name__ == "__main__":
    main()
