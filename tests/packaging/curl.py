#!/usr/bin/env python3
"""What the pages ask of curl, for images without it: -s, -f, -H, -d with a text or @FILE."""

import argparse
import sys
import urllib.error
import urllib.request
from pathlib import Path


def body_of(text: str | None) -> bytes | None:
    if text is None or not text.startswith("@"):
        return text.encode() if text else None
    return Path(text[1:]).read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-f", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    given = parser.parse_args()
    headers = dict(each.split(": ", 1) for each in given.H)
    request = urllib.request.Request(given.url, body_of(given.d), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            sys.stdout.write(answer.read().decode())
    except urllib.error.HTTPError:
        return 22 if given.f else 0
    except OSError:
        return 7
    return 0


if __name__ == "__main__":
    sys.exit(main())
