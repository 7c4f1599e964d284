"""What is in the store's memory and is not loaded from there; run by vLLM's python.

refused_loads.py MODEL URL: prints a JSON object of what happened to blocks loaded, loads that
failed and tokens computed.
"""

import json
import sys
from typing import Any

from tests.vllm.inside.groups import KINDS
from tests.vllm.inside.scheduled import Engine
from tests.vllm.inside.small_memory import ENOUGH, engine, prompts

FAR = 1 << 40  # bytes: beyond any pool here


def outcome(loading: Engine, **params: Any) -> list[int]:
    """What an engine did with the prompt."""
    loading.ask(prompts(1)[0], **params)
    while not loading.idle:
        loading.step()
    assert not loading.leaks(), loading.leaks()
    found = [sum(loading.loaded.values()), loading.failed, loading.computed]
    loading.close()
    return found


def beyond(loading: Engine) -> Engine:
    """Its store tells of places beyond the pool."""
    leases = loading.connector.scheduler.manager.leases
    load = leases.load

    def lying(*asked: Any) -> Any:
        runs, places = load(*asked)
        return runs, [(offset + FAR, crc) for offset, crc in places]

    leases.load = lying
    return loading


def told_together(model: str, url: str) -> bool:
    """A rank tells of the store's memory in the step in which another has stored something."""
    settings = {"url": url, "model": "told", "weights_revision": "none"}
    ranks = Engine(KINDS["latents"], model, 80, settings, ranks=2)
    one, other = (rank.worker for rank in ranks.ranks)
    one.connector_worker._connector_worker_meta.mark_completed(1)
    other.connector_worker.worker._told = 0
    told = one.build_connector_worker_meta().aggregate(other.build_connector_worker_meta())
    outcome(ranks)
    return bool(told.epochs[1]) and told.completed_jobs == {1: 1}


if __name__ == "__main__":
    model, url = sys.argv[1:]
    computing, *others = [engine("latents", model, url, ENOUGH) for _ in range(4)]
    outcome(computing)
    found = {
        "as it is": outcome(others[0]),
        "no tiers": outcome(others[1], kv_load_tiers=[]),
        "beyond": outcome(beyond(others[2])),
        "told together": told_together(model, url),
    }
    print("\n" + json.dumps(found), flush=True)
