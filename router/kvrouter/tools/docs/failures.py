"""Writes docs/failures.md from the table of failures.

`python -m kvrouter.tools.docs.failures > docs/failures.md`.
"""

from __future__ import annotations

from typing import Final

from kvrouter.serving.legs.failures import ROWS, Row
from kvrouter.tools.docs.markdown import table

HEAD: Final = """\
# Failures of engines

<!-- Written by `python -m kvrouter.tools.docs.failures`; do not edit. -->

What the router does when an engine fails a leg of a request: whether it asks another engine,
whether the engine's breaker counts it, and what the client gets if no engine answers. *Reason* is
the label of `kvrouter:upstream_errors_total`. Where a decode leg was to fetch KV from a prefill
engine, *once another engine does well* counts for [the pair](nixl.md#pairs-that-fail).

"""
FOOT: Final = """
- Another engine is asked only while the client has no content, at most `--retry-max-attempts`
  times. `/v1/responses` and `/v1/messages` go to another engine only where it says
  *always*. After the first content a stream ends with an error event, or goes on elsewhere with
  [`--resume-streams`](stream-failover.md).
- A prefill leg that has not begun goes to another prefill engine. After other failures, and after a
  refusal, the decode engine computes the prompt, within `--recompute-budget`: the leg's one token
  is the router's own, and engines may refuse what it cuts off, as a forced tool call. SGLang needs
  both legs: there another pair is asked.
- A second 500 is taken for the request's fault. The client gets it, and neither engine is counted.
- `Retry-After` is the shortest that a full engine named, within an hour, else 1 s.
- Answers above 8 MiB are passed on as they come. Those that must be joined, as several prompts or
  samples with legs of their own, may have 64 MiB each. Of an error above 8 MiB the client gets the
  status and the beginning of its message.
"""
_COLUMNS: Final = ("Reason", "What happened", "Another engine", "Counted", "The client gets")


def failures_page() -> str:
    """The whole page, in Markdown."""
    return f"{HEAD}{table(_COLUMNS, map(_cells, ROWS))}\n{FOOT}"


def _cells(row: Row) -> tuple[str, ...]:
    again = ("yes" if row.begun else "always") if row.again else "no"
    message = row.answer.message.format(leg="decode (prefill)")
    told = f"{row.answer.status}: {message}" if message else "the engine's status and words"
    if row.answer.retry_after_s is not None:
        told += " `Retry-After`"
    return (f"`{row.failure}`", row.what, again, row.counted, told)


if __name__ == "__main__":
    print(failures_page(), end="")
