"""Engines with NixlConnector, on the loopback of a machine without network devices."""

import time

from tests.vllm.engines import EngineFailed, ask, free_port
from tests.vllm.services import Service

TRANSFER = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
MET_S = 240.0


def loopback_environment() -> dict[str, str]:
    """What an engine is told of NIXL over UCX; each one has a port of its own."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_NET_DEVICES": "lo",
        "UCX_TLS": "tcp,self,sm",
    }


def until_met(router: Service) -> None:
    """Ask until two engines have shaken hands, which vLLM gives up after 5 s, busy or not."""
    until = time.monotonic() + MET_S
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1}
    while True:
        status, answer = ask(router.address, "POST", "/v1/completions", body, MET_S)
        if status == 200:
            return
        if time.monotonic() > until:
            raise EngineFailed(f"the router answered {status}: {answer[:500]!r}")
        time.sleep(0.5)
