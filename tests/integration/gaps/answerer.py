"""A server that answers each path with bytes, from a thread of its own."""

import socket
import threading
from collections.abc import Mapping
from typing import Self


class Answerer:
    """Answers a path that begins with a key of `pages` with its value, in a 200; others with `{}`.

    Attributes:
        address: HOST:PORT.
        asked: paths, in order.
    """

    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self._pages = pages
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                try:
                    self._answer(client)
                except OSError:
                    continue  # who asked has left

    def _answer(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(65536)
            if not piece:
                return
            head += piece
        path = head.split(b" ", 2)[1].decode()
        body = next((b for start, b in self._pages.items() if path.startswith(start)), b"{}")
        self.asked.append(path)
        client.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n")
        client.sendall(b"content-length: %d\r\n\r\n" % len(body))
        client.sendall(body)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):  # the rest of the question: a reset would lose the answer
            pass
