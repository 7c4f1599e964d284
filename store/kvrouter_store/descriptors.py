"""Open files of this process: their limit, and how many connections it allows."""

import resource
from typing import Final

RESERVED: Final = 256
"""For what no stranger may take: listeners, files, checks, connections that the process opens."""


def raise_limit() -> str:
    """Raise the soft limit of open files to the hard one; returns a line for the log.

    The soft limit is 1,024 in most shells and units, so that programs that use select() work.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before == most:
        return f"open files: at most {before}"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:  # the kernel's own limit (fs.nr_open) is lower
        return f"open files: at most {before}, since the limit cannot be raised: {error}"
    return f"open files: at most {most} (the soft limit was {before})"


def connections(most: int, each: int) -> int:
    """How many connections may come in, `most` at the largest, if each takes `each` descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, (limit - RESERVED) // each))


def lack(most: int, each: int) -> str:
    """A sentence where the limit allows fewer connections than `most`; else ''."""
    allowed = connections(most, each)
    if allowed == most:
        return ""
    need = most * each + RESERVED
    return (
        f"open files: their hard limit allows {allowed} of {most} connections at a time, and "
        f"further ones are refused; raise it to {need} (ulimit -Hn, LimitNOFILE=)"
    )
