"""quarantine.py LASTFAILED: print the failed tests if each is in quarantine.txt, one per line.

LASTFAILED is pytest's cache of failed tests. Exit status 1, and the others' names on standard
error, if a test failed that is not in the list; 2 if the list breaks its own rules.
"""

import json
import sys
from pathlib import Path

LIST = Path(__file__).with_name("quarantine.txt")
MOST = 5


def quarantined(text: str) -> dict[str, str]:
    """The tests in a list, each with its reason. Raises ValueError for a list that is not valid."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    entries = {name: reason.strip() for name, _, reason in (line.partition(" ") for line in lines)}
    if len(lines) > MOST:
        raise ValueError(f"{len(lines)} tests are in quarantine; {MOST} are allowed")
    if silent := [name for name, reason in entries.items() if not reason]:
        raise ValueError(f"no reason: {' '.join(silent)}")
    return entries


def main(last_failed: Path) -> int:
    """Print what may run again; the exit status."""
    try:
        allowed = quarantined(LIST.read_text())
    except ValueError as error:
        print(f"{LIST.name}: {error}", file=sys.stderr)
        return 2
    failed: list[str] = sorted(json.loads(last_failed.read_text()))
    others = [name for name in failed if name.partition("[")[0] not in allowed]
    if others:
        print("failed, and not in quarantine:", *others, sep="\n", file=sys.stderr)
        return 1
    print(*failed, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
