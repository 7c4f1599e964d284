"""Gets a router's status document each second and prints it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final

import msgspec

from kvrouter.control.page.model import Snapshot
from kvrouter.tools.terminal.draw import Line, screen
from kvrouter.tools.terminal.settings import StatusSettings, colours_wanted
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


PIPE_WIDTH: Final = 120
MAX_BYTES: Final = 16 << 20
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # its own screen, no cursor, no wrapping
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_CONTROL_PORT: Final = "give the URL of the router's control port (kvrouter serve --control-port)"


class Unreachable(Exception):
    """The router does not give its status; the reason and the remedy, in a sentence."""


def run(settings: StatusSettings) -> int:
    """Print the status until Ctrl-C; the exit code: 0, or 2 if the router does not give it."""
    live = sys.stdout.isatty() and not settings.once and not settings.json_lines
    try:
        with _own_screen() if live else contextlib.nullcontext():
            _show(settings, Client(settings), live)
    except Unreachable as error:
        print(Line(f"kvrouter status: {error}").shown(MAX_BYTES, colours=False), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader ended; nothing is left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class Client:
    """Gets the document. Raises Unreachable if `--ca-file` cannot be read."""

    def __init__(self, settings: StatusSettings) -> None:
        self._url = settings.url
        self._timeout_s = settings.timeout_s
        self._request = urllib.request.Request(f"{settings.url}/status.json")
        token = settings.token.get_secret_value()
        if token:
            self._request.add_header("Authorization", f"Bearer {token}")
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if settings.url.startswith("https:"):
            context = _trusting(settings.ca_file)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def document(self) -> tuple[bytes, Snapshot]:
        """The document as it came, and decoded. Raises Unreachable."""
        try:
            with self._opener.open(self._request, timeout=self._timeout_s) as answer:
                body: bytes = answer.read(MAX_BYTES)
            return body, msgspec.json.decode(body, type=Snapshot)
        except urllib.error.HTTPError as error:
            with error:
                raise Unreachable(self._refused(error.code)) from None
        except msgspec.DecodeError as error:
            raise Unreachable(
                f"this version does not understand {self._url}/status.json ({error}); use the "
                "kvrouter status of the router's own version"
            ) from None
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)  # of an URLError
            why = reason_of(cause) if isinstance(cause, OSError) else cause
            raise Unreachable(f"{self._url} does not answer ({why}); {_CONTROL_PORT}") from None

    def _refused(self, status: int) -> str:
        if status == 401:
            return f"{self._url} asks for the admin token: give KVROUTER_STATUS_TOKEN"
        return f"{self._url}/status.json answers {status}; {_CONTROL_PORT}"


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise Unreachable(f"--ca-file {ca_file}: {error.strerror or error}") from None


def _show(settings: StatusSettings, client: Client, live: bool) -> None:
    """Print the document once, or each `interval_s`.

    A live screen keeps the last document while the router does not answer; else Unreachable.
    """
    body, shown = client.document()
    lost_s: float | None = None
    while True:
        if settings.json_lines:
            print(body.decode(), flush=True)
        else:
            _draw(shown, lost_s, settings, live)
        if settings.once:
            return
        time.sleep(settings.interval_s)
        try:
            body, shown = client.document()
            lost_s = None
        except Unreachable:
            if not live:
                raise
            lost_s = lost_s or time.monotonic()


def _draw(shown: Snapshot, lost_s: float | None, settings: StatusSettings, live: bool) -> None:
    """Print the screen; a live one over the last one, which is not cleared, so it does not flicker.

    `lost_s`: since when the router does not answer, on the monotonic clock.
    """
    lines = screen(shown)
    if lost_s is not None:
        lost = f"no answer for {time.monotonic() - lost_s:.0f} s; this is the last status"
        lines.insert(0, Line(lost, "red"))
    terminal = sys.stdout.isatty()
    width, height = shutil.get_terminal_size() if terminal else (PIPE_WIDTH, 0)
    colours = colours_wanted(settings, terminal)
    text = [line.shown(width, colours=colours) for line in (lines[:height] if live else lines)]
    if live:
        text = ["\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in text) + "\x1b[J"]
    elif not settings.once:
        text.append("")
    print("\n".join(text), end="" if live else "\n", flush=True)


@contextlib.contextmanager
def _own_screen() -> Iterator[None]:
    """The terminal's other screen. The old one is back afterwards, also after SIGTERM."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, before)
