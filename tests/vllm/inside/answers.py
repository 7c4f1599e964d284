"""How an engine puts the blocks of an answer while it generates it; run by vLLM's python.

answers.py MODEL URL: prints a JSON object of kinds to the blocks of each put, and to the blocks
that another engine then loads of the prompt and its answer.
"""

import json
import sys
from typing import Any

from tests.vllm.inside.groups import BLOCK
from tests.vllm.inside.scheduled import Engine
from tests.vllm.inside.small_memory import ENOUGH, engine

PROMPT, ANSWER = [7] * (BLOCK + 7), 10 * BLOCK  # tokens


def watched(computing: Engine) -> list[int]:
    """The chunks of each put from now on."""
    puts: list[int] = []
    (tier,) = computing.connector.scheduler.manager.secondary_tiers
    submit = tier.submit_store

    def counting(job: Any) -> None:
        puts.append(len(job.keys))
        submit(job)

    tier.submit_store = counting
    return puts


def answered(kind: str, model: str, url: str) -> tuple[list[int], int]:
    """The puts of an answer, and what is loaded of it."""
    computing, loading = (engine(kind, model, url, ENOUGH) for _ in range(2))
    puts = watched(computing)
    request = computing.scheduler.requests[computing.ask(PROMPT, max_tokens=ANSWER)]
    while not computing.idle:
        computing.step()
    loading.ask([*request.all_token_ids, 7])
    while not loading.idle:
        loading.step()
    for each in (computing, loading):
        assert not each.leaks(), each.leaks()
        each.close()
    return puts, loading.loaded[0]


if __name__ == "__main__":
    model, url = sys.argv[1:]
    found = {kind: answered(kind, model, url) for kind in ("latents", "two windows")}
    print("\n" + json.dumps(found), flush=True)
