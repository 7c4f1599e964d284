"""Engines whose host memory is smaller than what waits for it; run by vLLM's python.

small_memory.py MODEL URL: prints a JSON object: by kind of groups and chunks of memory, blocks
loaded of each group; null for requests that did not end.
"""

import json
import sys

from tests.vllm.inside.groups import BLOCK, KINDS, LAYERS, PAGE
from tests.vllm.inside.scheduled import Engine

from kvrouter_store.connectors.vllm import pace

PROMPT_BLOCKS = 12
MOST_STEPS = 2000  # those that end need a hundredth of it
pace.ASSUMED_S = 1.0  # so that nobody gives up, however crowded the machine is
ENOUGH = 1000  # chunks


def prompts(many: int) -> list[list[int]]:
    """Prompts of whole blocks and a few tokens, none of which begins like another."""
    size = PROMPT_BLOCKS * BLOCK + 7
    return [[1000 * number + token for token in range(size)] for number in range(many)]


def engine(kind: str, model: str, url: str, chunks: int) -> Engine:
    """An engine with room for so many chunks."""
    settings = {
        "url": url,
        "model": kind.replace(",", ""),
        "weights_revision": "none",
        "cpu_bytes_to_use": chunks * (LAYERS * PAGE + 4096),  # vLLM rounds chunks to pages
    }
    return Engine(KINDS[kind], model, 80, settings)


def loaded(kind: str, model: str, url: str, chunks: int, many: int) -> list[int] | None:
    """What one engine loads of prompts that another one computed, all asked for at once."""
    computing, loading = engine(kind, model, url, ENOUGH), engine(kind, model, url, chunks)
    for prompt in prompts(many):
        computing.ask(prompt)
        while not computing.idle:
            computing.step()
    for prompt in prompts(many):
        loading.ask(prompt)
    steps = 0
    while not loading.idle and steps < MOST_STEPS:
        loading.step()
        steps += 1
    if not loading.idle:
        return None
    computing.close()
    loading.close()
    return [loading.loaded[group] for group in range(len(KINDS[kind].specs))]


if __name__ == "__main__":
    model, url = sys.argv[1:]
    found = {
        f"{kind}, {chunks} chunks, {many} prompts": loaded(kind, model, url, chunks, many)
        for kind in ("latents", "two windows", "latents, window, state")
        for chunks, many in (
            (8, 1),
            (40, 1),
            (20, 8),
            (4 * PROMPT_BLOCKS, 12),
            (4 * PROMPT_BLOCKS, 30),
        )
    }
    print("\n" + json.dumps(found), flush=True)
