"""The numbers of docs/sizing.md: its table by its own formula, its example as a doctest."""

import doctest

import pytest
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "sizing.md"
MODELS = [row for row in rows(PAGE) if len(row) == 7 and row[1].isdecimal()]


def test_a_dozen_models_are_in_the_table() -> None:
    assert len(MODELS) >= 12


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row[0])
def test_a_models_kv_follows_from_its_configuration(row: list[str]) -> None:
    name, layers, heads, size, *told = row
    both = 1 if "MLA" in name else 2  # keys and values, or what MLA keeps in their place
    token_bytes = both * int(layers) * int(heads) * int(size) * 2
    kib, mib = f"{token_bytes / 2**10:.1f}", f"{token_bytes * 1000 / 2**20:.1f}"
    assert told == [kib, mib, f"{2**36 // token_bytes:,}"]


def test_the_example_computes_what_it_says() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 5
    assert failed == 0
