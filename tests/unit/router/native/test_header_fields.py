"""The header fields of a request as a dictionary, against a plain one."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import HeaderFields

names = st.sampled_from([b"Host", b"X-A", b"x-a", b"Content-Length", b"!#$%&'*+-.^_`|~09AZaz"])
values = st.one_of(st.binary(max_size=12), st.sampled_from([b"", b" ", b"a \t", b"a b", b"\xe9"]))
lines = st.lists(st.tuples(names, values), max_size=8)


def filled(found: list[tuple[bytes, bytes]], max_lines: int, max_bytes: int) -> HeaderFields:
    fields = HeaderFields(max_lines, max_bytes)
    for name, value in found:
        fields.add(name, value)
    return fields


@given(lines)
def test_fields_come_by_lower_case_name_and_repeated_ones_joined(
    found: list[tuple[bytes, bytes]],
) -> None:
    expected: dict[str, list[str]] = {}
    for name, value in found:
        text = value.rstrip(b" \t").decode("latin-1")
        expected.setdefault(name.decode("ascii").lower(), []).append(text)
    fields = filled(found, 8, 1000)
    assert fields.take() == {name: ", ".join(texts) for name, texts in expected.items()}
    assert fields.take() == {}


@given(lines, st.integers(0, 8), st.integers(0, 100))
def test_fields_beyond_the_bounds_are_not_given(
    found: list[tuple[bytes, bytes]], max_lines: int, max_bytes: int
) -> None:
    taken = filled(found, max_lines, max_bytes).take()
    total_bytes = sum(len(name) + len(value) for name, value in found)
    assert (taken is None) == (len(found) > max_lines or total_bytes > max_bytes)
