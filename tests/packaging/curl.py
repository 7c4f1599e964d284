#!/usr/bin/env python3
"""What the pages ask of curl, for images that have none: -s, -f, -H, and -d with a text or @FILE."""

import argparse
import sys
import urllib.error
import urllib.request
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-f", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    given = parser.parse_args()
    body = given.d and (Path(given.d[1:]).read_text() if given.d.startswith("@") else given.d)
    headers = dict(each.split(": ", 1) for each in given.H)
    request = urllib.request.Request(given.url, body and body.encode(), headers)
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
