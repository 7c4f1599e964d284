"""What an engine promises the router, from vLLM's state of a request."""

from types import SimpleNamespace
from typing import Any

from kvrouter_store.connectors.vllm.report import report

BLOCK = 16


def group(number: int, reach: int | None, block_tokens: int = BLOCK) -> SimpleNamespace:
    return SimpleNamespace(
        group_idx=number, sliding_window_size_in_chunks=reach, tokens_per_chunk=block_tokens
    )


def state(number: int, given: int) -> SimpleNamespace:
    keys = [f"{number}/{block}" for block in range(given + 1)]
    return SimpleNamespace(next_stored_chunk_idx=given, offload_keys=keys)


def told(
    *groups: SimpleNamespace,
    given: int = 4,
    prompt: int = 4 * BLOCK + 3,
    lost: frozenset[str] = frozenset(),
    loaded: frozenset[str] = frozenset(),
    **more: Any,
) -> dict[str, Any]:
    """The report about a request of `prompt` tokens, of whose blocks `given` went to the store."""

    def lookup(key: str, _: object) -> SimpleNamespace:
        return SimpleNamespace(name="MISS" if key in lost else "HIT_PENDING")

    manager = SimpleNamespace(
        primary_tier=SimpleNamespace(lookup=lookup),
        leases=SimpleNamespace(loaded=lambda _: loaded),
    )
    config = SimpleNamespace(kv_group_configs=groups, tokens_per_hash=BLOCK)
    status = SimpleNamespace(
        group_states=[state(each.group_idx, given) for each in groups],
        req=SimpleNamespace(num_prompt_tokens=prompt),
        req_context=None,
        max_offload_tokens=more.get("most"),
        num_locally_computed_tokens=more.get("held", 0),
    )
    links = {
        each.group_idx: SimpleNamespace(
            manifest=SimpleNamespace(
                digest=bytes([each.group_idx]), spec=SimpleNamespace(root="ab")
            )
        )
        for each in groups
    }
    arrivals = SimpleNamespace(fetched=lambda _: more.get("fetched"))
    tier: Any = SimpleNamespace(
        links=links, away=more.get("away", False), node=more.get("node", ""), arrivals=arrivals
    )
    scheduler = SimpleNamespace(manager=manager, config=config)
    return report(scheduler, status, tier, more.get("refusal", ""))


def test_a_model_of_full_attention_says_its_manifest_and_how_far_it_gave() -> None:
    expected = {"manifest": "00", "blocks": 4, "block_tokens": BLOCK, "root": "ab"}
    expected |= {"waits": True, "held": 32}
    assert told(group(0, None), held=32) == expected


def test_what_became_of_a_hint_is_answered() -> None:
    fetched = {"requested": 4, "accepted": 4, "honoured": 3}
    assert told(group(0, None), fetched=fetched)["fetch"] == fetched


def test_the_engines_own_node_is_named_where_others_can_reach_it() -> None:
    assert told(group(0, None), node="kv://a:7400")["node"] == "kv://a:7400"


def test_other_groups_are_named_after_the_one_that_is_matched_on() -> None:
    found = told(group(0, 2), group(1, None), group(2, 1))
    assert found["manifest"] == "01"
    assert found["groups"] == [
        {"manifest": "01", "reach": None},
        {"manifest": "00", "reach": 2},
        {"manifest": "02", "reach": 1},
    ]


def test_tails_are_promised_where_a_hit_of_the_prompt_ends() -> None:
    groups = group(0, None), group(1, 2)
    assert told(*groups, prompt=4 * BLOCK)["blocks"] == 3
    assert told(*groups, prompt=4 * BLOCK + 1)["blocks"] == 4


def test_nothing_is_promised_of_a_tail_that_was_not_kept() -> None:
    groups = group(0, None), group(1, 2)
    assert told(*groups, lost=frozenset({"1/2"}))["blocks"] == 0
    assert told(*groups, lost=frozenset({"1/1", "0/2"}))["blocks"] == 4


def test_nothing_is_promised_while_the_store_is_away() -> None:
    assert told(group(0, None), away=True)["blocks"] == 0


def test_an_engine_that_put_nothing_says_why() -> None:
    groups = group(0, None), group(1, 2)
    assert "cause" not in told(*groups)
    assert told(*groups, away=True)["cause"] == "engine_store_away"
    assert told(*groups, most=0)["cause"] == "not_shared"
    assert told(*groups, given=0)["cause"] == "host_memory"
    assert told(*groups, lost=frozenset({"1/2"}))["cause"] == "no_tail"


def test_blocks_that_are_named_by_a_part_of_them_are_not_matched() -> None:
    assert "different sizes" in told(group(0, None, 4 * BLOCK), group(1, 2))["refusal"]


def test_an_engine_that_names_blocks_in_another_way_says_so() -> None:
    assert told(group(0, None), refusal="why") == {"refusal": "why"}


def test_a_tail_that_came_from_the_stores_memory_is_promised_too() -> None:
    groups, tail = (group(0, None), group(1, 2)), frozenset({"1/2", "1/3"})
    assert told(*groups, lost=tail)["blocks"] == 0
    assert told(*groups, lost=tail, loaded=tail)["blocks"] == 4
