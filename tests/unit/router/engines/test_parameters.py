"""Every cell of the table of parameters against what the families really say to engines."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrouter.engines.families import FAMILIES
from kvrouter.engines.families.base import Family, LegOrder
from kvrouter.engines.families.parameter_table import (
    Parameter,
    ParameterTable,
    Served,
    Tokenize,
    Treatment,
)
from kvrouter.engines.families.parameters import TRANSFERS, VLLM
from kvrouter.engines.families.vllm import Vllm
from kvrouter.openai.request import Kind, Request, parse
from kvrouter.tools.docs.parameters import parameters_page

ROOT = Path(__file__).resolve().parents[4]
Json = dict[str, Any]

GIVEN: Json = {
    "model": "other",
    "prompt": "Twice",
    "messages": [{"role": "user", "content": "Ho"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
    "best_of": 1,
    "max_tokens": 9,
    "max_completion_tokens": 8,
    "min_tokens": 2,
    "cache_salt": "pepper",
    "ignore_eos": False,
    "truncate_prompt_tokens": -1,
    "vllm_xargs": {"kv_transfer_params": "x"},
}
"""What a client gives where the router reads the value; elsewhere any value does."""


def request_with(name: str, kind: Kind, value: Any = None) -> Request:
    """A request of that endpoint with this parameter given."""
    body: Json = {"model": "m", "stream": name == "stream_options"}
    body["messages" if kind == "chat" else "prompt"] = GIVEN[
        "messages" if kind == "chat" else "prompt"
    ]
    body[name] = GIVEN.get(name, 3) if value is None else value
    return parse(json.dumps(body).encode(), kind, 8)


def cells() -> Iterator[Any]:
    for family in FAMILIES.values():
        for row in family.parameters.rows.values():
            for kind in sorted(row.kinds):
                yield pytest.param(family, row, kind, id=f"{family.name}-{row.name}-{kind}")


@pytest.mark.parametrize(("family", "row", "kind"), list(cells()))
def test_each_leg_does_what_the_table_says(
    family: type[Family], row: Parameter, kind: Kind
) -> None:
    request = request_with(row.name, kind)
    given = json.loads(request.body)[row.name]
    split = family.order is not LegOrder.SINGLE
    prefill = json.loads(family().prefill_body(request)) if split else {}
    decode = json.loads(family().decode_body(request, None))
    if row.served is Served.REFUSED:
        assert family.parameters.refused(request) == row.name
    elif not split:
        pass
    elif row.prefill is Treatment.KEPT:
        assert prefill[row.name] == given
    elif row.prefill in (Treatment.SET, Treatment.SET_IF_GIVEN):
        assert prefill[row.name] == json.loads(row.value)
    elif row.prefill is Treatment.OWN:
        assert prefill.get(row.name) != given
    else:
        assert row.name not in prefill
    if row.decode is Treatment.KEPT:
        assert decode[row.name] == given
    else:
        assert row.name not in decode
    assert family.parameters.alone(request) == (row.name if row.served is Served.ALONE else None)
    assert family.parameters.tokenizable(request) == (row.tokenize is not Tokenize.BARS)
    told = json.loads(family().tokenize_body(request))
    assert (row.name in told) == (row.tokenize is Tokenize.TAKES)


@pytest.mark.parametrize("value", [None, False, [], ""])
def test_what_is_not_really_given_changes_nothing(value: Any) -> None:
    for row in VLLM.rows.values():
        for kind in row.kinds:
            body: Json = {"model": "m", "messages": [], "prompt": "a", row.name: value}
            raw = json.dumps(body).encode()
            if row.name in GIVEN:
                continue
            request = parse(raw, kind, 8)
            assert VLLM.alone(request) is None
            assert VLLM.refused(request) is None
            assert VLLM.tokenizable(request)


def test_a_default_is_as_good_as_nothing() -> None:
    assert VLLM.tokenizable(request_with("tool_choice", "chat", "auto"))
    assert not VLLM.tokenizable(request_with("tool_choice", "chat", "none"))


def test_a_truncation_by_number_is_the_same_on_both_legs() -> None:
    assert VLLM.alone(request_with("truncate_prompt_tokens", "completion", 5)) is None


def test_transfers_cannot_be_steered_through_the_engines_own_arguments() -> None:
    for name in TRANSFERS:
        assert VLLM.refused(request_with("vllm_xargs", "chat", {name: "x"})) == "vllm_xargs"
    for harmless in ({"top": 1}, ["kv_transfer_params"], "kv_transfer_params"):
        assert VLLM.refused(request_with("vllm_xargs", "chat", harmless)) is None
    escaped = b'{"model":"m","prompt":"a","vllm_xargs":{"\\u006bv_transfer_params":"x"}}'
    assert VLLM.refused(parse(escaped, "completion", 8)) == "vllm_xargs"


def test_a_parameter_of_the_other_endpoint_is_passed_through() -> None:
    assert VLLM.alone(request_with("suffix", "chat")) is None


def test_a_family_states_what_it_does_otherwise() -> None:
    stop = replace(VLLM.rows["stop"], prefill=Treatment.KEPT)
    other = VLLM.changed(stop, Parameter("room", prefill=Treatment.OWN, decode=Treatment.OWN))
    assert "stop" not in other.left_out_on_prefill
    assert "room" in other.own
    assert len(other.rows) == len(VLLM.rows) + 1
    assert "stop" in VLLM.left_out_on_prefill


class Other(Vllm):
    name = "other"
    parameters = ParameterTable(
        replace(row, prefill=Treatment.KEPT) if row.name == "stop" else row
        for row in VLLM.rows.values()
        if row.name != "n"
    )


def test_the_page_shows_of_further_families_what_differs() -> None:
    page = parameters_page({"vllm": Vllm, "other": Other, "same": Vllm})
    other = page.split("## other")[1].split("## same")[0]
    assert "Unknown here: `n`." in other
    assert other.count("\n| `") == 1
    assert "| `stop` | both legs | kept | kept |" in other
    assert page.endswith("\n## same\n\nAs vllm.\n")


def test_the_page_of_parameters_is_what_the_tables_say() -> None:
    current = (ROOT / "docs" / "parameters.md").read_text()
    how = "python -m kvrouter.tools.docs.parameters > docs/parameters.md"
    assert current == parameters_page(FAMILIES), f"write it again: {how}"
