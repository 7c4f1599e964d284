"""Steps by vLLM's own model runner mixin, one of them broken off by SIGTERM; run by vLLM's python.

broken_step.py URL: prints a JSON list: how many of each step's two blocks the store has.
"""

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.connector import KVStoreConnector, PlanMetadata
from kvrouter_store.connectors.vllm.plan import SaveOrder, StepPlan
from kvrouter_store.connectors.vllm.worker import WorkerSide
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

BLOCKS, PAGE = 4, 64
SPEC = CacheSpec("tiny", "r1", "float32", 16, "sha256_cbor", "00" * 32)
MANIFEST = Manifest(SPEC, (Part((0, 2), (0, 1), 0, 2 * PAGE, Layout.opaque("test")),))


def end(*_: object) -> None:
    """What vLLM's worker does when it is told to end (v1/executor/multiproc_executor.py)."""
    raise SystemExit


def hashes(step: int) -> bytes:
    """The names of a step's blocks."""
    return b"".join(bytes([step, block]) * 16 for block in (1, 2))


def run_step(connector: KVStoreConnector, step: int, *, cut: bool) -> None:
    """One forward pass that completes blocks 1 and 2."""
    plan = StepPlan(MANIFEST.doc, saves=[SaveOrder("r", hashes(step), 0, (1, 2))])
    output: Any = SimpleNamespace(
        kv_connector_metadata=PlanMetadata(plan), has_sync_kv_loads=False, finished_req_ids=set()
    )
    with mixin.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output):
        if cut:
            os.kill(os.getpid(), signal.SIGTERM)


def main(url: str) -> None:
    """A whole step, one that is cut, and another whole one."""
    log = logging.getLogger("broken_step")
    client = StoreClient(url)
    connector = object.__new__(KVStoreConnector)
    connector._worker = WorkerSide(0, lambda told: StoreLink(client, told, log), log)
    connector._worker.register(
        {f"layers.{n}": torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for n in range(2)}, BLOCKS
    )
    mixin.has_kv_transfer_group = lambda: True
    mixin.get_kv_transfer_group = lambda: connector
    mixin.get_forward_context = lambda: None
    signal.signal(signal.SIGTERM, end)
    for step, cut in enumerate((False, True, False)):
        with suppress(SystemExit):
            run_step(connector, step, cut=cut)
    print(json.dumps([client.match(MANIFEST, hashes(step)).blocks for step in range(3)]))
    connector._worker.shutdown()


main(sys.argv[1])
