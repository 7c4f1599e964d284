"""What clients are run before: a simulated engine alone, and a router over one for each leg."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.vllm.engines import ask, free_port
from tests.vllm.services import Service, start_http, start_router, start_store

MODEL = "sim"


@dataclass
class Fleet:
    """Its processes."""

    alone: Service
    prefill: Service
    decode: Service
    router: Service

    def rests(self) -> bool:
        """Whether no engine has a request, and the router neither."""
        engines = (self.alone, self.prefill, self.decode)
        running = [value(engine, "vllm:num_requests_running") for engine in engines]
        return not any([*running, value(self.router, "kvrouter:num_requests_running")])

    def aborted(self) -> tuple[float, float]:
        """Requests that the prefill and the decode engine began and did not end."""
        name, label = "vllm:request_success_total", 'finished_reason="abort"'
        return value(self.prefill, name, label), value(self.decode, name, label)

    def landed(self) -> float:
        """Prompts whose KV came from the prefill engine to the decode engine."""
        return value(self.router, "kvrouter:landings_total", 'outcome="landed"')


@contextmanager
def started(folder: Path) -> Iterator[Fleet]:
    """A fleet, until the context ends."""
    with ExitStack() as cleanup:
        store = start_store(folder, memory="64MiB")
        cleanup.callback(store.stop)
        engines = []
        for name in ("alone", "prefill", "decode"):
            flags = () if name == "alone" else ("--store", store.url, "--role", name)
            engines.append(start_engine(folder, name, *flags))
            cleanup.callback(engines[-1].stop)
        alone, prefill, decode = engines
        router = start_router(folder, [prefill.address], [decode.address], store.url)
        cleanup.callback(router.stop)
        yield Fleet(alone, prefill, decode, router)


def start_engine(folder: Path, name: str, *flags: str) -> Service:
    """A simulated engine that needs 40 s for the longest answer of a test, 20 s for its prompt."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvrouter", "sim", "--model", MODEL, "--port", port),
        *(
            "--enable-scale-out",
            "--block-size",
            16,
            "--inter-token-latency",
            "20ms",
            "--prefill-time-per-token",
            "2ms",
            *flags,
        ),
    ]
    return start_http(name, command, folder, port)


def value(service: Service, name: str, label: str = "") -> float:
    """The sum of a metric's series that have a label."""
    lines = ask(service.address, "GET", "/metrics", None, 10.0)[1].decode().splitlines()
    assert any(line.startswith(f"# TYPE {name} ") for line in lines), f"no {name}"
    series = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in series if label in line)
