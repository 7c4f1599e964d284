"""A child process that hangs."""

import os
import signal


def stall(pid: int) -> None:
    """SIGSTOP to a child; returns when all its threads stand still, until SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
