"""Runs a command that has processes of its own, and ends all of them with itself.

`python -m kvrouter.tools.demo.guard COMMAND...` leads a session of its own. SIGTERM ends the
command, and then kills what it leaves behind. SIGUSR1 kills all at once, as a crash does. Either
way what Python's resource trackers know of is cleaned up before they go: they are killed last.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["run"]

ASKED_S, CLEANED_S, LOOK_S = 3.0, 15.0, 0.1
# A tracker ends by itself when those that it serves are gone; a busy machine lets it wait for that.
_PR_SET_CHILD_SUBREAPER = 36
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)


def run(command: Sequence[str]) -> int:
    """Run it until all its processes are gone; returns the command's exit status."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    unblock = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # noqa: E731
    # Kept to the end: one that is thrown away takes the status of a child that has ended already.
    process = subprocess.Popen(command, preexec_fn=unblock)  # noqa: PLW1509 - no threads here
    status = 0
    kill_at_s, give_up_at_s = float("inf"), float("inf")
    while True:
        heard = signal.sigtimedwait(_HEARD, LOOK_S if kill_at_s < float("inf") else 60.0)
        now_s = time.monotonic()
        for pid, ended in _ended():
            if pid == process.pid:
                status, kill_at_s = ended, min(kill_at_s, now_s)
        if not _session():
            return status
        if heard is not None and heard.si_signo == signal.SIGTERM and kill_at_s > now_s + ASKED_S:
            os.kill(process.pid, signal.SIGTERM)
            kill_at_s = now_s + ASKED_S
        if heard is not None and heard.si_signo == signal.SIGUSR1:
            kill_at_s = now_s
        if now_s >= kill_at_s:
            give_up_at_s = min(give_up_at_s, now_s + CLEANED_S)
            _kill(trackers=now_s >= give_up_at_s)


def _ended() -> Iterator[tuple[int, int]]:
    """Children that ended, adopted ones too, with their exit status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _session() -> list[int]:
    """The other processes of our session."""
    own, found = os.getsid(0), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == own:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def _kill(*, trackers: bool) -> None:
    for pid in _session():
        try:
            if trackers or b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            continue


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
