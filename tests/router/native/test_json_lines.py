"""Lines of JSON that are written natively: what json reads from them is what was put in."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter._native import JsonLines

NAMES = ("one", "two", "three")
Value = str | float | bool | None
values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(max_codepoint=0x7F))
)


def read(value: Value) -> Value:
    """What stands in a line for `value`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@given(st.lists(st.tuples(values, values, values), max_size=4))
@example([('\ud800 \x00\x1f\x7f "\\/\n é €', 1 << 80, -(1 << 63)), (None, None, None)])
@example([(-0.0004, 0.9996, 1e300), (-1.5, 12.34, -9e12), (True, False, math.nan)])
def test_each_line_says_what_was_put_in(added: list[tuple[Value, Value, Value]]) -> None:
    lines = JsonLines(NAMES)
    for line in added:
        lines.add(line)
    taken = lines.take()
    assert (len(lines), lines.take()) == (0, b"")
    told = [json.loads(line) for line in taken.split(b"\n")[:-1]]
    assert len(told) == len(added)
    for found, line in zip(told, added, strict=True):
        expected = {n: v for n, v in zip(NAMES, line, strict=True) if v is not None}
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert type(found[name]) in (type(value), type(None))
            assert found[name] == pytest.approx(read(value), abs=0.0005001)


def test_a_line_that_cannot_be_written_leaves_no_trace() -> None:
    lines = JsonLines(NAMES)
    lines.add(("a", None, 1))
    with pytest.raises(TypeError):
        lines.add(("b", b"bytes", None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one value for each name"):
        lines.add(("b",))
    lines.add((None, 2, None))
    assert lines.take() == b'{"one":"a","three":1}\n{"two":2}\n'


def test_names_are_as_long_as_is_copied_at_once() -> None:
    lines = JsonLines(["n" * 28, "m"])
    lines.add((1, 2))
    assert lines.take() == b'{"%b":1,"m":2}\n' % (b"n" * 28)
    with pytest.raises(ValueError, match="28 bytes"):
        JsonLines(["n" * 29])
