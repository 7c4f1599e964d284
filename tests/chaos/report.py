"""What drills print, each line at once."""

from collections.abc import Sequence

from tests.chaos.judge import Leak, Verdict

MOST_PROBLEMS = 40


def say(line: str) -> None:
    """Print a line."""
    print(line, flush=True)


def left_over(leaks: Sequence[Leak]) -> str:
    """What is above its first value, for a sentence."""
    return ", ".join(f"{k.name} {k.after:g}" for k in leaks if k.leaked) or "nothing"


def say_problems(leaks: Sequence[Leak], verdict: Verdict) -> None:
    """What is left over, and the first of all problems."""
    say(f"left over of {len(leaks)} gauges: {left_over(leaks)}")
    for problem in verdict.problems[:MOST_PROBLEMS]:
        say(f"PROBLEM {problem}")
