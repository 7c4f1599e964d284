from dataclasses import replace

import pytest

from kvrouter.engines.compatibility import on_other_servers, partners
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.prefix.lower import Loadable
from kvrouter.routing.plan import (
    RouteInputs,
    chosen_by,
    computed_tokens,
    held_tokens,
    loaders,
    missing_tokens,
    usable_blocks,
)
from kvrouter.routing.policies.least_tokens import LeastTokens
from kvrouter.routing.rendezvous import in_order


def engine(port: int, manifest: str | None = None) -> Engine:
    made = Engine(f"e:{port}", Role.BOTH)
    made.identity = Identity(("m",), manifest=manifest)
    return made


@pytest.mark.parametrize(
    ("prompt_tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)]
)
def test_the_last_token_is_always_computed_so_its_block_is_not_usable(
    prompt_tokens: int, blocks: int
) -> None:
    assert usable_blocks(prompt_tokens, 16) == blocks


def test_a_prompt_of_less_than_a_block_and_a_token_misses_nothing() -> None:
    decode = engine(1)
    assert missing_tokens(RouteInputs(16, [decode], exact=True, block_tokens=16), decode) == 0
    assert missing_tokens(RouteInputs(17, [decode], exact=True, block_tokens=16), decode) == 16


def test_an_estimated_size_cannot_rule_a_block_out() -> None:
    decode = engine(1)
    assert missing_tokens(RouteInputs(3, [decode], block_tokens=16), decode) == 3


def test_what_the_engine_holds_and_what_it_could_load_is_not_missing() -> None:
    decode = engine(1, "d")
    inputs = RouteInputs(
        100,
        [decode],
        exact=True,
        block_tokens=16,
        matches={decode: 1},
        store_blocks={"d": 4, "other": 6},
    )
    assert held_tokens(inputs, decode) == 64
    assert missing_tokens(inputs, decode) == 96 - 64


def test_what_the_engine_can_load_from_its_own_lower_tiers_is_not_missing() -> None:
    decode, other = engine(1), engine(2)
    lower = {decode: Loadable(5, 0.8)}
    inputs = RouteInputs(
        100, [decode], exact=True, block_tokens=16, matches={decode: 1}, lower=lower
    )
    assert (held_tokens(inputs, decode), held_tokens(inputs, other)) == (80, 0)
    assert (missing_tokens(inputs, decode), missing_tokens(inputs, other)) == (16, 96)
    assert (computed_tokens(inputs, decode), computed_tokens(inputs, other)) == (20, 100)
    assert chosen_by(replace(inputs, matches={}), decode) == "exact"


def test_a_prefill_engine_computes_what_it_neither_holds_nor_loads_nor_is_guessed_to_hold() -> None:
    decode, prefill, guessed, loader = engine(1), engine(2), engine(3), engine(4, "d")
    inputs = RouteInputs(
        100,
        [decode],
        [prefill, guessed, loader],
        exact=True,
        block_tokens=16,
        matches={decode: 6, prefill: 2},
        guesses={guessed: 9},
        store_blocks={"d": 4},
    )
    computed = [computed_tokens(inputs, each) for each in inputs.prefill]
    assert computed == [100 - 32, 100 - 96, 100 - 64]


def test_a_match_beyond_the_usable_blocks_counts_only_up_to_them() -> None:
    decode = engine(1)
    inputs = RouteInputs(32, [decode], exact=True, block_tokens=16, matches={decode: 2})
    assert held_tokens(inputs, decode) == 16
    assert missing_tokens(inputs, decode) == 0


def test_engines_of_different_manifests_are_no_partners() -> None:
    decode, same, other, silent = engine(1, "x"), engine(2, "x"), engine(3, "y"), engine(4)
    assert partners([same, other, silent, decode], decode) == [same, silent]
    refusing = engine(5, "x")
    refusing.identity = Identity(("m",), manifest="x", refusal="why")
    assert partners([same, refusing], decode) == [same]
    assert partners([same], refusing) == []


def test_engines_that_have_an_adapter_from_different_paths_are_no_partners_for_it() -> None:
    def having(port: int, path: str) -> Engine:
        made = engine(port)
        made.identity = Identity(("m", "lora"), adapters=(("lora", path),))
        return made

    decode, same, other = having(1, "/v2"), having(2, "/v2"), having(3, "/v1")
    assert partners([same, other], decode, "lora") == [same]
    assert partners([same, other], decode, "m") == [same, other]
    inputs = RouteInputs(50, [decode], [other], model="lora")
    assert LeastTokens().plan(inputs).why == "adapters differ"


def test_ranks_of_one_engine_are_no_partners_and_the_last_to_be_asked_after_a_failure() -> None:
    divided, other = engine(1), engine(2)
    divided.set_ranks((0, 1))
    first, second = divided.ranks
    assert partners([first, second, other], first) == [other]
    assert on_other_servers([second, other], [first]) == [other]
    assert on_other_servers([second], [first]) == [second]


def test_only_engines_that_need_what_landed_can_stand_in_for_the_decode_engine() -> None:
    same, other, unknown, stranger = engine(2, "d"), engine(3, "x"), engine(4), engine(5, "d")
    stranger.family = "nixl"
    decode = [same, other, unknown, stranger]
    assert loaders(decode, "store", "d") == [same]
    assert loaders(decode, "store", None) == [unknown]


def test_an_engine_is_chosen_by_what_it_surely_holds_before_what_it_may_hold() -> None:
    sure, likely, idle = engine(1), engine(2), engine(3)
    inputs = RouteInputs(100, [sure, likely, idle], matches={sure: 1}, guesses={likely: 9, sure: 9})
    assert [chosen_by(inputs, each) for each in inputs.decode] == ["exact", "learnt", "load"]


def test_a_session_has_its_place_only_while_no_engine_holds_any_of_it() -> None:
    gone = engine(3)
    one, other = in_order(b"s", [engine(1), engine(2)])
    inputs = RouteInputs(100, [one, other], learnt=True, session=b"s", guesses={gone: 3})
    assert (chosen_by(inputs, one), chosen_by(inputs, other)) == ("session", "load")
    assert chosen_by(replace(inputs, guesses={other: 3}), one) == "load"
    assert chosen_by(replace(inputs, decode=[one]), one) == "load"
    assert chosen_by(replace(inputs, session=None), one) == "load"
