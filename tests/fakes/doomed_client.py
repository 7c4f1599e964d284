"""A client that stops for ever at one step of a put or get, for its parent to kill there.

python -m tests.fakes.doomed_client URL TRANSPORT put|get STEP

TRANSPORT is rdma over the machine's device, or stand-in:FOLDER for rdma over a stand-in.

Prints "step N NAME" and stops when it comes to step STEP; with STEP -1 prints all steps and ends.
"""

import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.fakes.rdma import opens_of
from tests.fakes.store import Memory, chain_of, manifest_of

from kvrouter_store import _core
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.transports import stream
from kvrouter_store.connection import channel as connection
from kvrouter_store.connection.channel import Channel, exchange_hello
from kvrouter_store.rdma.initiator import Initiator, RemotePool

BLOCK = 64 << 10
BLOCKS = 4
MANIFEST = manifest_of(BLOCK)
CHAIN = chain_of(BLOCKS)


class Steps:
    """Counts the moments around each message and each copy."""

    def __init__(self, stop_at: int) -> None:
        self._stop_at = stop_at
        self._count = 0

    def reached(self, name: str) -> bool:
        """Whether to stop at this step."""
        here = self._count == self._stop_at
        if here or self._stop_at < 0:
            print(f"step {self._count} {name}", flush=True)
        self._count += 1
        return here

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a step before and after it."""

        def stepped(*args: Any, **kwargs: Any) -> Any:
            if self.reached(f"before {name}"):
                signal.pause()
            result = function(*args, **kwargs)
            if self.reached(f"after {name}"):
                signal.pause()
            return result

        return stepped

    def during(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same, with a step in the middle of it: it is done over and over again."""
        stepped = self.around(name, function)

        def repeated(*args: Any, **kwargs: Any) -> Any:
            if self.reached(f"during {name}"):
                while True:
                    function(*args, **kwargs)
            return stepped(*args, **kwargs)

        return repeated


def main() -> None:
    url, transport, operation, stop_at = sys.argv[1:]
    steps = Steps(int(stop_at))
    names: Any = Channel
    names.ask = steps.around("message", Channel.ask)
    module: Any = connection
    module.exchange_hello = steps.around("handshake", exchange_hello)
    over: Any = stream
    over.put = steps.during("payload", stream.put)
    over.get_into = steps.during("payload", stream.get_into)
    remote: Any = RemotePool
    remote.write = steps.during("write", RemotePool.write)
    remote.read = steps.during("read", RemotePool.read)
    core: Any = _core
    core.LocalWriter.put = steps.during("post", _core.LocalWriter.put)
    core.gather = steps.during("copy", _core.gather)
    core.scatter = steps.during("copy", _core.scatter)
    memory = Memory(BLOCKS, BLOCK)
    span = range(BLOCKS)
    wanted: Any = "rdma" if ":" in transport else transport
    client = StoreClient(url, transport=wanted, rdma=Initiator(opens=opens_of(transport)))
    if operation == "put":
        memory.holds(CHAIN)
        client.put(MANIFEST, 0, CHAIN, span, memory.segments, span)
    else:
        client.get_into(MANIFEST, 0, CHAIN, span, memory.segments, span)
    print("done", flush=True)


if __name__ == "__main__":
    main()
