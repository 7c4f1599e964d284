"""beside.py HOST PORT: does on the other of two machines what tests on the first one ask for.

Each connection carries lines of JSON; a program that was started for it ends with it.
"""

import socket
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tests.fakes.patience import PATIENCE_S, eventually
from tests.rdma.programs import begin
from tests.rdma.rig import Control

LINK = Path("/sys/class/net/eth0")
IS_UP = 1


class Hands:
    """What one connection asks for; the reply to each request is what its method returns."""

    def __init__(self, control: Control, programs: ExitStack) -> None:
        self.control = control
        self.programs = programs

    def run(self, command: list[str]) -> dict[str, Any]:
        """Start a program of kvrouter; its URLs."""
        return begin(self.programs, command)

    def cut(self, after_bytes: int, for_s: float) -> dict[str, Any]:
        """Take the network down for a while, as soon as so many more bytes have left by it."""
        self.control.send(ready=True)
        end = _sent_bytes() + after_bytes
        assert eventually(lambda: _sent_bytes() >= end, PATIENCE_S, look_s=0.001)
        _set_up(False)
        time.sleep(for_s)
        _set_up(True)
        return {}


def _sent_bytes() -> int:
    return int((LINK / "statistics/tx_bytes").read_text())


def _set_up(up: bool) -> None:
    flags = int((LINK / "flags").read_text(), 16)
    (LINK / "flags").write_text(hex(flags | IS_UP if up else flags & ~IS_UP))


def serve(link: socket.socket) -> None:
    """Answer one connection until it ends."""
    with closing(Control(link)) as control, ExitStack() as programs:
        hands = Hands(control, programs)
        while True:
            try:
                request = control.receive()
            except OSError:
                return
            control.send(**getattr(hands, request.pop("op"))(**request))


def main() -> None:
    """Accept until killed."""
    host, port = sys.argv[1:]
    listener = socket.create_server((host, int(port)))
    while True:
        link, _ = listener.accept()
        threading.Thread(target=serve, args=(link,), daemon=True).start()


if __name__ == "__main__":
    main()
