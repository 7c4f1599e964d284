"""YAML of a few lines that stands for billions of values, or for itself."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.credentials.caller_keys import read_keys
from kvrouter.options import bounded_yaml
from kvrouter.options.bounded_yaml import MAX_DEPTH, TooMuch, load_bounded
from kvrouter.options.load import MAX_BYTES, UnreadableFile, read_settings_file

DOUBLED = "- &a0 [x, x]\n" + "".join(f"- &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 30))
MERGED = "- &a0 {x: y}\n" + "".join(
    f"- &a{k} {{<<: [*a{k - 1}, *a{k - 1}]}}\n" for k in range(1, 30)
)
ITSELF = "&a [*a]"
NESTED = "[" * 500 + "]" * 500
HELD = "- &a0 [x]\n" + "".join(f"- &a{k} [*a{k - 1}]\n" for k in range(1, MAX_DEPTH + 2))
TOO_MUCH = {
    "doubled": DOUBLED,
    "merged": MERGED,
    "itself": ITSELF,
    "nested": NESTED,
    "held": HELD,
}


def load(text: str) -> object:
    return load_bounded(yaml.SafeLoader(text))


@pytest.mark.parametrize("text", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_what_is_much_work_is_refused(text: str) -> None:
    with pytest.raises(TooMuch):
        load(text)


@pytest.mark.parametrize("text", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_every_file_that_the_router_reads_is_bounded(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.yaml"
    indented = "\n".join("  " + line for line in text.splitlines())
    file.write_text(f"decode:\n{indented}\n")
    file.chmod(0o600)
    with pytest.raises(UnreadableFile, match=r"more than \d+"):
        read_settings_file(str(file), {"decode"})
    with pytest.raises(ValueError, match=r"more than \d+"):
        read_keys(str(file))


def test_a_settings_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("# " + "x" * MAX_BYTES)
    with pytest.raises(UnreadableFile, match="more than 1 MiB"):
        read_settings_file(str(file), {"decode"})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(1, 3))
def test_everything_else_is_read_as_ever(value: object, times: int) -> None:
    text = yaml.safe_dump([value] * times)  # repeated values are written as aliases
    assert load(text) == yaml.safe_load(text)


def test_as_many_values_as_may_be_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_yaml, "MAX_VALUES", 10)
    assert load("- x\n" * 9) == ["x"] * 9
    with pytest.raises(TooMuch):
        load("- x\n" * 10)
