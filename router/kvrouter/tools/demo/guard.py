"""Runs a command that has processes of its own, and ends all of them together.

`python -m kvrouter.tools.demo.guard COMMAND...` leads a session of its own. SIGTERM ends the
command, and then kills what it leaves behind. SIGUSR1 kills all at once, as a crash does. Python's
resource trackers are killed last, so that they can clean up before.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

TERM_S, CLEAN_UP_S, LOOK_S = 3.0, 15.0, 0.1
# A tracker ends by itself when the processes that it serves are gone. On a busy machine that lasts.
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)


def run(command: Sequence[str]) -> int:
    """Run it until all its processes are gone; the command's exit status."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    unblock = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # noqa: E731
    # Referenced to the end: the finalizer of a Popen waits for its child, and takes its status.
    process = subprocess.Popen(command, preexec_fn=unblock)  # noqa: PLW1509 - no threads here
    status = 0
    kill_at_s, give_up_at_s = float("inf"), float("inf")
    while True:
        came = signal.sigtimedwait(_SIGNALS, LOOK_S if kill_at_s < float("inf") else 60.0)
        number = came.si_signo if came is not None else 0
        now_s = time.monotonic()
        for pid, ended in _ended():
            if pid == process.pid:
                status, kill_at_s = ended, min(kill_at_s, now_s)
        if not _session():
            return status
        if number == signal.SIGTERM and kill_at_s > now_s + TERM_S:
            os.kill(process.pid, signal.SIGTERM)
            kill_at_s = now_s + TERM_S
        if number == signal.SIGUSR1:
            kill_at_s = now_s
        if now_s >= kill_at_s:
            give_up_at_s = min(give_up_at_s, now_s + CLEAN_UP_S)
            _kill(trackers=now_s >= give_up_at_s)


def _ended() -> Iterator[tuple[int, int]]:
    """Children that ended, adopted ones too, with their exit status."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _session() -> list[int]:
    """The other processes of our session."""
    own, found = os.getsid(0), []
    for entry in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == own:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def _kill(*, trackers: bool) -> None:
    for pid in _session():
        with suppress(ProcessLookupError, FileNotFoundError):
            if trackers or b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
