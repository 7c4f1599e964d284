"""Steps by vLLM's own model runner mixin, the last broken off by SIGTERM; run by vLLM's python.

broken_step.py MODEL URL: prints a JSON list: how many blocks of each step's prompt the store has.
MODEL is any small model: only its configuration is read.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from tests.vllm.inside.groups import BLOCK, KINDS, PAGE
from tests.vllm.inside.scheduled import Engine, sampled
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvrouter_store.client.blocking import StoreClient

BLOCKS, END_S = 3, 20.0


def end(*_: object) -> None:
    """What vLLM's worker does when it is told to end (v1/executor/multiproc_executor.py)."""
    raise SystemExit


def run_step(engine: Engine, *, cut: bool) -> None:
    """One step, as vLLM's worker and its engine core run it."""
    output = engine.scheduler.schedule()
    told: Any = SimpleNamespace(
        kv_connector_metadata=output.kv_connector_metadata,
        has_sync_kv_loads=False,
        finished_req_ids=output.finished_req_ids,
    )
    with mixin.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(told) as connector_output:
        if cut:
            os.kill(os.getpid(), signal.SIGTERM)
    model_output = sampled(engine.scheduler, list(output.num_scheduled_tokens), connector_output)
    engine.scheduler.update_from_output(output, model_output)


def main(model: str, url: str) -> None:
    """Prompts that one step computes: two whole, and one that is cut."""
    settings = {
        "url": url,
        "model": "broken",
        "weights_revision": "none",
        "cpu_bytes_to_use": 64 * PAGE,
    }
    engine = Engine(KINDS["latents"], model, 64, settings)
    mixin.has_kv_transfer_group = lambda: True
    mixin.get_kv_transfer_group = lambda: engine.worker
    mixin.get_forward_context = lambda: None
    signal.signal(signal.SIGTERM, end)
    chains = []
    for prompt, cut in enumerate((False, False, True)):
        request = engine.ask([prompt] * (BLOCKS * BLOCK + 1))
        chains.append(b"".join(engine.scheduler.requests[request].block_hashes))
        with suppress(SystemExit):
            run_step(engine, cut=cut)
        until = time.monotonic() + END_S
        while not cut and not engine.idle and time.monotonic() < until:
            run_step(engine, cut=False)
    client = StoreClient(url)
    tier = engine.connector.scheduler.manager.secondary_tiers[0]
    print(
        "\n" + json.dumps([client.match(tier.links[0].manifest, chain).blocks for chain in chains])
    )
    engine.close()


main(*sys.argv[1:])
