"""Copies between shapes, against a reference that permutes arrays.

KVROUTER_SHAPE_PAIRS says how many pairs of shapes are tried, beside those that hypothesis finds.
"""

import os
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.shapes import Numpy, check_copy, random_pair

PAIRS = int(os.environ.get("KVROUTER_SHAPE_PAIRS", "400"))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_copy_between_two_shapes_is_what_permuting_arrays_yields(data: st.DataObject) -> None:
    def choose(options: Any) -> Any:
        return data.draw(st.sampled_from(options))

    check_copy(random_pair(choose), choose, data.draw(st.integers(0, 999)), Numpy())


def test_many_random_pairs_of_shapes_are_copied_right() -> None:
    draw, arrays = random.Random(20), Numpy()
    kinds: dict[str, int] = {}
    for number in range(PAIRS):
        pair = random_pair(draw.choice)
        check_copy(pair, draw.choice, number, arrays)
        kind = f"{pair.target.parts[0].layout.kind}, {pair.target.spec.groups[0]}"
        kinds[kind] = kinds.get(kind, 0) + 1
    print(f"{PAIRS} pairs, none different: {kinds}")
    assert sum(kinds.values()) == PAIRS
