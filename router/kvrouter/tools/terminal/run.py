"""Asks a router what it knows, each second, and shows it. Ends with 2 where it cannot be asked."""

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
from kvrouter.tools.terminal.draw import screen
from kvrouter.tools.terminal.settings import colours_wanted
from kvrouter.tools.terminal.words import Paint, fitted, plain, width_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from kvrouter.tools.terminal.settings import StatusSettings

PIPE_WIDTH: Final = 120
MAX_BYTES: Final = 16 << 20
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # its own screen, no cursor, no wrapping
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"


class Unreachable(Exception):
    """The router does not say what it knows; why, and the remedy, in a sentence."""


def run(settings: StatusSettings) -> int:
    """Show what the router knows until Ctrl-C; the exit code: 0, or 2 where it cannot be asked."""
    try:
        asking = Asking(settings)
        if settings.once or settings.json_lines or not sys.stdout.isatty():
            _print(settings, asking)
        else:
            with _own_screen():
                _watch(settings, asking)
    except Unreachable as error:
        print(plain(f"kvrouter status: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # who read it has had enough; nothing is left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


class Asking:
    """Fetches the document.

    Args:
        settings: where it is, and the token.

    Raises:
        Unreachable: its file of authorities cannot be read.
    """

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

    def raw(self) -> bytes:
        """The document as JSON.

        Raises:
            Unreachable: it is not to be had.
        """
        try:
            with self._opener.open(self._request, timeout=self._timeout_s) as answer:
                body: bytes = answer.read(MAX_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                raise Unreachable(self._refused(error.code)) from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise Unreachable(
                f"nothing answers at {self._url} ({why}); give the URL of the router's control "
                "port (kvrouter serve --control-port)"
            ) from None
        return body

    def snapshot(self) -> tuple[bytes, Snapshot]:
        """The document, as it came and as it is understood.

        Raises:
            Unreachable: it is not to be had.
        """
        body = self.raw()
        try:
            return body, msgspec.json.decode(body, type=Snapshot)
        except msgspec.DecodeError as error:
            raise Unreachable(
                f"{self._url}/status.json is not what this version knows ({error}); use the "
                "kvrouter status of the router's own version"
            ) from None

    def _refused(self, status: int) -> str:
        if status == 401:
            return f"{self._url} asks for the admin token: give KVROUTER_STATUS_TOKEN"
        return (
            f"{self._url}/status.json answers {status}; give the URL of the router's control port "
            "(kvrouter serve --control-port)"
        )


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise Unreachable(f"--ca-file {ca_file}: {error.strerror or error}") from None


def _print(settings: StatusSettings, asking: Asking) -> None:
    """Line after line, once or each `interval_s`."""
    terminal = sys.stdout.isatty()
    paint = Paint(colours_wanted(settings, terminal))
    while True:
        body, snapshot = asking.snapshot()
        if settings.json_lines:
            print(body.decode(), flush=True)
        else:
            width = shutil.get_terminal_size().columns if terminal else PIPE_WIDTH
            print("\n".join(screen(snapshot, width, paint)), flush=True)
        if settings.once:
            return
        if not settings.json_lines:
            print()
        time.sleep(settings.interval_s)


def _watch(settings: StatusSettings, asking: Asking) -> None:
    """The same screen again and again; a router that is lost is said to be.

    Raises:
        Unreachable: it could not be asked at all.
    """
    paint = Paint(colours_wanted(settings, True))
    shown, lost_s = asking.snapshot()[1], None
    while True:
        width, height = shutil.get_terminal_size()
        lines = screen(shown, width, paint)
        if lost_s is not None:
            ago = f"no answer for {time.monotonic() - lost_s:.0f} s; this is what it said last"
            lines.insert(0, paint(ago, "bold", "red"))
        _draw(lines, width, height)
        time.sleep(settings.interval_s)
        try:
            shown, lost_s = asking.snapshot()[1], None
        except Unreachable:
            lost_s = lost_s if lost_s is not None else time.monotonic()


def _draw(lines: list[str], width: int, height: int) -> None:
    """Over what was there, without clearing it first: nothing flickers."""
    cut = [line if width_of(line) <= width else fitted(line, width) for line in lines[:height]]
    body = "\r\n".join(f"{line}\x1b[K" for line in cut)
    sys.stdout.write(f"\x1b[H{body}\x1b[J")
    sys.stdout.flush()


@contextlib.contextmanager
def _own_screen() -> Iterator[None]:
    """The terminal as it was is back afterwards, also where SIGTERM ends it."""

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, before)
