"""The mock engines' connector: it puts the numbered block of each prefilled prompt.

A thread of the benchmark's process, on the core of the load, so that no router pays for it.
"""

import socket
import threading
from typing import Self

from benchmarks.wire_prompts import BLOCK_BYTES, BLOCK_TOKENS, Prompt, chain, manifest
from kvrouter_store import _core
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.identity.chain import hash_tokens, root_hash

RECEIVE_BYTES = 8 << 20


class Saver:
    """Listens for the mock's datagrams and puts blocks. A context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._chains: dict[int, tuple[bytes, list[int]]] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._socket.sendto(b"", self._socket.getsockname())
            self._thread.join()
        self._socket.close()

    def start(self, url: str, asked: list[Prompt]) -> None:
        """Begin to put blocks of these prompts into the store at `url`."""
        for prompt in asked:
            if prompt.numbered:
                first = (prompt.tokens or prompt.numbered)[0]
                self._chains[first] = chain(prompt.tokens), prompt.numbered
        self._thread = threading.Thread(target=self._run, args=(url,), name="saver")
        self._thread.start()

    def _run(self, url: str) -> None:
        kv = _core.Segments.over(bytearray(BLOCK_BYTES), BLOCK_BYTES, writable=False)
        mock, root = manifest(), root_hash()
        with StoreClient(url, name="mock connector") as store:
            store.register(mock, engine="mock")
            while message := self._socket.recv(64):
                first, number = map(int, message.split())
                if first not in self._chains:
                    continue
                before, numbered = self._chains[first]
                parent = before[-32:] or None
                name = hash_tokens([*numbered, number], BLOCK_TOKENS, root=root, parent=parent)
                count = len(before) // 32
                store.put(mock, 0, before + name.data, range(count, count + 1), kv, [0])
