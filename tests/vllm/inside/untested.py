"""Engines of a vLLM that says it is newer than what was tested; run by vLLM's python.

untested.py MODEL URL: prints a JSON object: by kind of cache groups, what an engine that is allowed
to start says ('' if it starts and computes); of one kind also if it is not allowed to, or if one of
its parts is broken.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vllm
from tests.vllm.inside.groups import BLOCK, KINDS, PAGE
from tests.vllm.inside.scheduled import Engine

from kvrouter_store.connectors.settings import ConnectorRefused

BREAKS: dict[str, tuple[str, Any]] = {
    "names": ("vllm.v1.core.kv_cache_utils.hash_block_tokens", lambda *_: b"other"),
    "copies": (
        "kvrouter_store.connectors.vllm.host_worker.HostWorker.submit_load",
        lambda *_: True,
    ),
    "store": ("kvrouter_store.connectors.link.StoreLink.get_into", lambda *_: []),
}


def told(name: str, model: str, url: str, *, broken: str = "", allowed: bool = True) -> str:
    """Why an engine does not start."""
    settings = {
        "url": url,
        "model": name.replace(",", ""),
        "weights_revision": "none",
        "cpu_bytes_to_use": 64 * PAGE,
        "allow_untested": allowed,
    }
    with ExitStack() as changes:
        changes.enter_context(patch.object(vllm, "__version__", "0.99.0"))
        if broken:
            changes.enter_context(patch(*BREAKS[broken]))
        before = set(Path("/dev/shm").glob("vllm_offload*"))
        try:
            engine = Engine(KINDS[name], model, 64, settings)
        except ConnectorRefused as error:
            left = set(Path("/dev/shm").glob("vllm_offload*")) - before
            return f"{error}{' AND LEAVES MEMORY BEHIND' if left else ''}"
        engine.ask(range(3 * BLOCK))
        while not engine.idle:
            engine.step()
        engine.close()
    return ""


if __name__ == "__main__":
    model, url = sys.argv[1:]
    found = {
        name: {
            "allowed": told(name, model, url),
        }
        for name in KINDS
    }
    found["latents"] |= {"not allowed": told("latents", model, url, allowed=False)}
    found["latents"] |= {each: told("latents", model, url, broken=each) for each in BREAKS}
    print("\n" + json.dumps(found))
