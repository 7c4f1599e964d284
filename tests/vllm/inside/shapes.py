"""Copies between random pairs of shapes, compared with torch; run by the vLLM environment's python.

shapes.py PAIRS: prints how many of each kind were tried. Fails with the first wrong byte.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fakes.shapes import Torch, check_copy, random_pair


def main(pairs: int) -> None:
    """Try that many."""
    draw, arrays = random.Random(21), Torch()
    kinds: Counter[str] = Counter()
    for number in range(pairs):
        pair = random_pair(draw.choice)
        check_copy(pair, draw.choice, number, arrays)
        kinds[f"{pair.target.parts[0].layout.kind}, {pair.target.spec.groups[0]}"] += 1
    print(json.dumps(kinds))


main(int(sys.argv[1]))
