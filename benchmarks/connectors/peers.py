"""The other connectors: what they install, which process they need, and how an engine uses them."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lmcache.server import QUIET, transfer_config
from tests.vllm.engines import free_port
from tests.vllm.nixl import TRANSFER, loopback_environment
from tests.vllm.services import Service

from benchmarks.peers_setup import loopback_bind, run

HERE = Path(__file__).resolve().parent
MAKE_NIXL = HERE.parents[1] / "tests" / "vllm" / "make_nixl.sh"
CHUNK_TOKENS = 64  # a block of the engines
CLIENT_TTL_S = 60  # Mooncake's master forgets the memory of an engine that is silent for so long
STORE_BYTES = 1 << 30  # holds every prompt of the benchmark
LMCACHE, MOONCAKE, NIXL = "LMCache", "MooncakeStore", "Nixl"


class Missing(Exception):
    """A peer cannot run here; the text says why."""


@dataclass(frozen=True)
class Joined:
    """What an engine needs to use a connector: its configuration, environment and import paths."""

    transfer: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()


def _made(script: Path, *arguments: str | Path) -> str:
    """The folder that an installing script prints. Raises Missing with its last line."""
    try:
        return run(["sh", str(script), *map(str, arguments)], script.name)
    except RuntimeError as error:
        raise Missing(str(error)) from None


def _service(
    name: str, environment: dict[str, str], command: list[Any], folder: Path, stack: ExitStack
) -> Service:
    words = [f"{key}={value}" for key, value in environment.items()]
    service = Service.start(name, ["env", *words, *command], folder)
    stack.callback(service.stop)
    return service


def lmcache(python: Path, folder: Path, stack: ExitStack) -> Joined:
    """LMCache's multiprocess server; on a CPU the engines copy through shared memory."""
    site = _made(HERE / "make_peer.sh", "lmcache", python)
    environment = {**QUIET, "PYTHONHASHSEED": "0"}
    port, http_port = free_port(), free_port()
    command = [
        *(python, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", port),
        *("--http-host", "127.0.0.1", "--http-port", http_port, "--chunk-size", CHUNK_TOKENS),
        *("--l1-size-gb", STORE_BYTES >> 30, "--eviction-policy", "LRU"),
        *("--disable-observability", "--supported-transfer-mode", "engine_driven"),
    ]
    server = _service("lmcache", {**environment, "PYTHONPATH": site}, command, folder, stack)
    server.wait_http(f"127.0.0.1:{http_port}", "/healthcheck")
    return Joined(transfer_config(port), environment, (site,))


def mooncake(python: Path, folder: Path, stack: ExitStack) -> Joined:
    """Mooncake's master; the segment that it manages is mounted by the engine itself."""
    site = _made(HERE / "make_peer.sh", "mooncake", python)
    try:
        loopback = str(loopback_bind())
    except RuntimeError as error:
        raise Missing(str(error)) from error
    config = folder / "mooncake.json"
    environment = {
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "LD_LIBRARY_PATH": f"{site}/lib",
        "LD_PRELOAD": loopback,
    }
    port, metrics_port = free_port(), free_port()
    master = Path(site) / "mooncake" / "mooncake_master"
    master.chmod(0o755)  # pip loses the mode of a program inside a package
    command = [
        *(master, "--rpc_address", "127.0.0.1"),
        *("--rpc_port", port, "--metrics_host", "127.0.0.1", "--metrics_port", metrics_port),
        *("--client_ttl", CLIENT_TTL_S),
    ]
    _service("mooncake", environment, command, folder, stack).wait_port(port)
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": f"{STORE_BYTES >> 20}mb",
        "local_buffer_size": "64mb",
    }
    config.write_text(json.dumps(settings))
    transfer = {
        "kv_connector": "MooncakeCpuConnector",
        "kv_connector_module_path": "mooncake_cpu",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }
    environment["MOONCAKE_CONFIG_PATH"] = str(config)
    return Joined(transfer, environment, (site, str(HERE / "inside")))


def nixl(python: Path, folder: Path, stack: ExitStack) -> Joined:
    """NIXL over UCX on the loopback. No process of its own."""
    return Joined(TRANSFER, loopback_environment(), (_made(MAKE_NIXL),))


PEERS: dict[str, Callable[[Path, Path, ExitStack], Joined]] = {
    LMCACHE: lmcache,
    MOONCAKE: mooncake,
    NIXL: nixl,
}
