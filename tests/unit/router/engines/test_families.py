"""What each leg's body says. The standard library cuts the requests: only splicing is tested."""

import contextlib
import json
import re
from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import CacheGroup
from kvrouter.engines.families.base import BadAnswer, Family, Handoff, KvSource, PendingKv
from kvrouter.engines.families.nixl import PREFILL, Nixl
from kvrouter.engines.families.sglang import Rooms, Sglang
from kvrouter.engines.families.splice import splice
from kvrouter.engines.families.vllm import Vllm
from kvrouter.serving.request.context import leg_fields, with_own_id, without_rank
from kvrouter_store.connectors.vllm_tier.announced import fetch_hint
from kvrouter_store.identity.chain import root_hash

Spans = dict[str, tuple[int, int]]


def spans_of(body: bytes) -> Spans:
    """Spans of the top-level values, by the standard library's decoder."""
    text, decoder = body.decode("latin-1"), json.JSONDecoder()
    found: Spans = {}
    at = text.index("{") + 1
    while text[at:].lstrip()[0] != "}":
        at = text.index('"', at)
        key, at = decoder.raw_decode(text, at)
        at = text.index(":", at) + 1
        at += len(text[at:]) - len(text[at:].lstrip())
        _, end = decoder.raw_decode(text, at)
        found[key] = (at, end)
        at = end
    return found


@dataclass
class Asked:
    """A request as the families see it."""

    body: bytes
    kind: Literal["completion", "chat"] = "completion"
    spans: Spans = field(init=False)

    def __post_init__(self) -> None:
        self.spans = spans_of(self.body)


def asked(kind: Literal["completion", "chat"] = "completion", **members: Any) -> Any:
    return Asked(json.dumps({"model": "m"} | members).encode(), kind)


def completion(**members: Any) -> Any:
    return asked("completion", **({"prompt": "Once"} | members))


def chat(**members: Any) -> Any:
    return asked("chat", **({"messages": [{"role": "user", "content": "Hi"}]} | members))


@pytest.fixture
def family() -> Vllm:
    return Vllm()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
keys = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), min_size=1, max_size=6)
bodies = st.dictionaries(keys, json_values, max_size=6)


@given(
    body=bodies,
    indent=st.sampled_from([None, 0, 2]),
    changes=st.dictionaries(keys, st.none() | json_values.map(lambda v: (v,)), max_size=4),
)
def test_splicing_means_what_changing_the_object_would(
    body: dict[str, Any], indent: int | None, changes: dict[str, Any]
) -> None:
    raw = json.dumps(body, indent=indent).encode()
    spliced = splice(
        raw,
        spans_of(raw),
        {key: None if new is None else json.dumps(new[0]).encode() for key, new in changes.items()},
    )
    expected = {key: value for key, value in body.items() if key not in changes}
    expected |= {key: new[0] for key, new in changes.items() if new is not None}
    assert json.loads(spliced) == expected


def test_values_that_are_not_changed_keep_their_bytes() -> None:
    raw = b'{"a" : 1e2 , "b":[ 1,2 ], "n":12345678901234567890123}'
    spans = spans_of(raw)
    assert splice(raw, spans, {"b": None}) == b'{"a":1e2,"n":12345678901234567890123}'
    assert splice(raw, spans, {"b": b"0", "a": b"1", "c": b"{}"}) == (
        b'{"c":{},"a" : 1 , "b":0, "n":12345678901234567890123}'
    )
    assert splice(b" { } ", {}, {"c": b"1", "d": None, "e": b"2"}) == b'{"c":1,"e":2 } '


def test_the_prefill_leg_asks_for_one_token_and_nothing_may_end_it_before(family: Vllm) -> None:
    request = completion(
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
        min_tokens=5,
        stop=["x"],
        stop_token_ids=[3],
        bad_words=["y"],
        n=1,
        best_of=1,
        logprobs=3,
        response_format={"type": "json_object"},
        guided_regex="a+",
        structured_outputs={"json": {}},
        temperature=0.5,
        cache_salt="s",
        seed=7,
        logprob_token_ids=[1],
    )
    assert json.loads(family.prefill_body(request)) == {
        "model": "m",
        "prompt": "Once",
        "temperature": 0.5,
        "cache_salt": "s",
        "seed": 7,
        "response_format": {"type": "json_object"},
        "max_tokens": 1,
        "stream": False,
        "ignore_eos": True,
    }


def test_max_completion_tokens_is_one_where_it_was_given(family: Vllm) -> None:
    assert "max_completion_tokens" not in json.loads(family.prefill_body(chat()))
    body = json.loads(family.prefill_body(chat(max_completion_tokens=50)))
    assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1)


def test_what_changes_the_rendered_prompt_is_kept_on_the_prefill_leg(family: Vllm) -> None:
    kept = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"thinking": True},
        "documents": [{"text": "d"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "truncate_prompt_tokens": 10,
        "add_special_tokens": False,
        "mm_processor_kwargs": {"a": 1},
        "priority": 3,
    }
    body = json.loads(family.prefill_body(chat(**kept)))
    assert {key: body[key] for key in kept} == kept


@pytest.mark.parametrize(
    "steering",
    ["kv_transfer_params", "bootstrap_host", "bootstrap_room", "disaggregated_params"],
)
def test_a_client_cannot_steer_kv_transfers(family: Vllm, steering: str) -> None:
    request = completion(**{steering: {"do_remote_prefill": True}})
    for body in (
        family.prefill_body(request),
        family.decode_body(request, None),
        family.decode_body(request, Handoff()),
    ):
        assert steering not in json.loads(body)


def test_without_anything_to_change_the_decode_leg_is_the_clients_bytes(family: Vllm) -> None:
    request = completion(stream=True)
    assert family.decode_body(request, None) is request.body
    assert family.decode_body(request, Handoff(manifest="x", blocks=2)) is request.body


def test_token_ids_of_the_prefill_leg_become_the_prompt_of_the_decode_leg(family: Vllm) -> None:
    request = completion(max_tokens=9, min_tokens=2, stop=["x"])
    body = json.loads(family.decode_body(request, Handoff(prompt_token_ids=b"[1, 2,3]")))
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x"],
    }


def test_token_ids_known_before_go_to_both_legs(family: Vllm) -> None:
    request = completion()
    assert json.loads(family.prefill_body(request, prompt_ids=b"[4]"))["prompt"] == [4]
    assert json.loads(family.decode_body(request, None, prompt_ids=b"[4]"))["prompt"] == [4]


def test_a_chat_takes_token_ids_beside_its_messages(family: Vllm) -> None:
    request = chat()
    body = json.loads(family.decode_body(request, Handoff(prompt_token_ids=b"[1,2]")))
    assert body["kv_transfer_params"] == {"prompt_token_ids": [1, 2]}
    assert body["messages"] == [{"role": "user", "content": "Hi"}]


def test_the_prefill_leg_returns_token_ids_only_where_wanted(family: Vllm) -> None:
    request = completion(return_token_ids=True)
    assert "return_token_ids" not in json.loads(family.prefill_body(request))
    assert json.loads(family.prefill_body(request, want_ids=True))["return_token_ids"] is True
    assert json.loads(family.decode_body(request, None))["return_token_ids"] is True


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ({"echo": True}, "echo"),
        ({"echo": False}, None),
        ({"echo": None}, None),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"prompt_logprobs": None}, None),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logprobs": 3}, None),
    ],
)
def test_what_needs_the_whole_prompt_where_it_is_decoded_is_not_split(
    family: Vllm, member: dict[str, Any], reason: str | None
) -> None:
    assert family.unsplittable(completion(**member)) == reason


def test_only_content_that_is_text_is_hashable_from_token_ids(family: Vllm) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert family.hashable(completion())
    assert family.hashable(chat())
    assert family.hashable(chat(user='"image'))
    request = chat(messages=[{"role": "user", "content": [picture]}])
    assert not family.hashable(request)
    body = family.decode_body(request, Handoff(prompt_token_ids=b"[1]"))
    assert "kv_transfer_params" not in json.loads(body)


ANSWER: dict[str, Any] = {
    "id": "cmpl-1",
    "choices": [{"index": 0, "text": 'a "prompt_token_ids":[9] b', "prompt_token_ids": [1, 2, 3]}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": None},
    "kv_transfer_params": {
        "kvstore": {
            "manifest": "ab" * 32,
            "blocks": 2,
            "block_tokens": 16,
            "root": root_hash(None).hex(),
        }
    },
}


@pytest.mark.parametrize("indent", [None, 1])
def test_the_prefill_answer_has_ids_manifest_and_usage(family: Vllm, indent: int | None) -> None:
    handoff = family.read_prefill_answer(json.dumps(ANSWER, indent=indent).encode())
    assert handoff.prompt_token_ids is not None
    assert json.loads(handoff.prompt_token_ids) == [1, 2, 3]
    assert handoff.ids == array("I", [1, 2, 3]).tobytes()
    assert (handoff.manifest, handoff.blocks, handoff.block_tokens) == ("ab" * 32, 2, 16)
    assert handoff.root == root_hash(None)
    assert (handoff.prompt_tokens, handoff.cached_tokens) == (3, 0)
    assert handoff.reused_tokens is None  # without --enable-prompt-tokens-details
    assert handoff.transfer_params is None


def test_a_connector_that_refuses_to_share_says_why(family: Vllm) -> None:
    params = {"kvstore": {"manifest": "ab", "refusal": "two cache groups"}}
    answer = {"choices": [], "kv_transfer_params": params}
    handoff = family.read_prefill_answer(json.dumps(answer).encode())
    assert handoff == Handoff(manifest="ab", refusal="two cache groups")


def test_further_cache_groups_are_named_with_what_a_hit_needs_of_them(family: Vllm) -> None:
    groups = [{"manifest": "ab", "reach": None, "new": 1}, {"manifest": "cd", "reach": 4}]
    answer = {"choices": [], "kv_transfer_params": {"kvstore": {"groups": groups}}}
    handoff = family.read_prefill_answer(json.dumps(answer).encode())
    assert handoff.groups == (CacheGroup("ab"), CacheGroup("cd", 4))


def test_an_answer_of_a_chat_has_its_ids_at_the_top(family: Vllm) -> None:
    message = {"role": "assistant", "content": '\\"prompt_token_ids\\":[7]'}
    answer = {"choices": [{"message": message}], "prompt_token_ids": [5], "usage": None}
    handoff = family.read_prefill_answer(json.dumps(answer).encode())
    assert handoff == Handoff(prompt_token_ids=b"[5]", ids=array("I", [5]).tobytes())


def test_an_answer_without_ids_or_connector_has_none(family: Vllm) -> None:
    answer = {"choices": [{"text": "", "prompt_token_ids": None}], "kv_transfer_params": None}
    assert family.read_prefill_answer(json.dumps(answer).encode()) == Handoff()


@pytest.mark.parametrize("cached", [32, 0])
def test_cached_tokens_are_reported(family: Vllm, cached: int) -> None:
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": cached}}
    answer: dict[str, object] = {"choices": [], "usage": usage}
    handoff = family.read_prefill_answer(json.dumps(answer).encode())
    assert (handoff.prompt_tokens, handoff.cached_tokens) == (40, cached)
    assert (handoff.reused_tokens, handoff.held_tokens) == (cached, None)
    answer["kv_transfer_params"] = {"kvstore": {"held": cached // 2}}
    handoff = family.read_prefill_answer(json.dumps(answer).encode())
    assert handoff.held_tokens == cached // 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"<html>",
        b'{"choices":1}',
        b'{"choices":[],"usage":3}',
        b'{"choices":[],"kv_transfer_params":{"kvstore":{"root":"zz"}}}',
        b'{"choices":[],"kv_transfer_params":{"kvstore":{"blocks":"many"}}}',
        b'{"choices":[],"kv_transfer_params":{"kvstore":[1]}}',
        b'{"choices":[],"kv_transfer_params":{"kvstore":{"groups":[{"reach":1}]}}}',
        b'{"choices":[],"kv_transfer_params":{"kvstore":{"root":"abcd"}}}',
        b'{"prompt_token_ids":[1,2',
    ],
)
def test_what_is_no_completion_is_a_bad_answer(family: Vllm, body: bytes) -> None:
    with pytest.raises(BadAnswer):
        family.read_prefill_answer(body)


@pytest.mark.parametrize("family", [Vllm(), Sglang()], ids=["vllm", "sglang"])
@pytest.mark.parametrize("told", ["40", -1, 1 << 63, 1e30, [1], {}])
@pytest.mark.parametrize("name", ["prompt_tokens", "cached_tokens"])
def test_what_is_no_number_of_tokens_is_a_bad_answer(family: Family, told: Any, name: str) -> None:
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    (usage if name in usage else usage["prompt_tokens_details"])[name] = told  # type: ignore[index]
    answer = {"choices": [], "usage": usage}
    with pytest.raises(BadAnswer, match="is no number of tokens"):
        family.read_prefill_answer(json.dumps(answer).encode())


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_no_answer_whatsoever_raises_anything_else(body: bytes) -> None:
    family = Vllm()
    with contextlib.suppress(BadAnswer):
        family.read_prefill_answer(body)


def test_engines_own_connectors_get_what_the_prefill_engine_answered() -> None:
    family = Nixl()
    request = completion()
    asked_for = json.loads(family.prefill_body(request))["kv_transfer_params"]
    assert asked_for == json.loads(PREFILL)
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2]],
        "remote_port": 5600,
        "new": 1,
    }
    handoff = family.read_prefill_answer(
        json.dumps({"choices": [], "kv_transfer_params": params}).encode()
    )
    assert json.loads(family.decode_body(request, handoff))["kv_transfer_params"] == params
    both = family.decode_body(
        chat(), Handoff(prompt_token_ids=b"[1]", transfer_params=handoff.transfer_params)
    )
    assert json.loads(both)["kv_transfer_params"] == {"prompt_token_ids": [1]} | params


def test_both_legs_name_the_node_that_has_what_the_own_node_lacks() -> None:
    source, request = KvSource("kv://b:7400", "req-1", [7, 8]), completion()
    told = {
        "kvstore": {"source": source.node},
        "kv_hint": {
            "protocol_version": "0.1",
            "message_id": "req-1",
            "actions": [
                {
                    "action_id": "req-1-fetch",
                    "action_type": "kv.fetch",
                    "action_version": "1.0",
                    "payload": {"source_control_endpoint": source.node, "block_hashes": [7, 8]},
                }
            ],
        },
    }
    for body in (
        Vllm().prefill_body(request, source=source),
        Vllm().decode_body(request, Handoff(manifest="x"), source=source),
    ):
        assert json.loads(body)["kv_transfer_params"] == told
    pending = PendingKv(3, 2.0)
    body = Vllm().decode_body(request, None, pending=pending, source=source)
    coming = {"coming_blocks": 3, "wait_s": 2.0, "source": source.node}
    assert json.loads(body)["kv_transfer_params"] == {**told, "kvstore": coming}
    body = Vllm().decode_body(chat(), Handoff(prompt_token_ids=b"[1]"), source=source)
    assert json.loads(body)["kv_transfer_params"] == {"prompt_token_ids": [1], **told}


def test_no_hint_names_blocks_that_have_no_names() -> None:
    body = Vllm().decode_body(completion(), None, source=KvSource("kv://b:7400", "req-1", ()))
    assert json.loads(body)["kv_transfer_params"] == {"kvstore": {"source": "kv://b:7400"}}


def test_a_clients_own_source_goes_nowhere() -> None:
    hint = fetch_hint("evil", "kv://evil:1", [1])
    request = completion(
        kv_transfer_params={"kvstore": {"source": "kv://evil:1"}, "kv_hint": hint},
        kv_hint=hint,
        kv_hints=hint,
    )
    for body in (Vllm().prefill_body(request), Vllm().decode_body(request, None)):
        assert b"evil" not in body


def test_engines_whose_own_connectors_hand_over_are_named_no_node() -> None:
    source, request = KvSource("kv://b:7400", "req-1", [7]), completion()
    body = json.loads(Nixl().prefill_body(request, source=source))
    assert body["kv_transfer_params"] == json.loads(PREFILL)
    handoff = Handoff(transfer_params=b'{"do_remote_prefill":true}')
    body = json.loads(Nixl().decode_body(request, handoff, source=source))
    assert body["kv_transfer_params"] == {"do_remote_prefill": True}


@pytest.mark.parametrize(
    ("said", "node"),
    [
        ("kv://Host:7400/", "kv://host:7400"),
        ("kvs://[::1]:7400", "kvs://[::1]:7400"),
        ("kv+unix:///run/s.sock", "kv+unix:///run/s.sock"),
        ("http://host", None),
        (7, None),
        (None, None),
    ],
)
def test_the_node_that_an_engine_writes_to_is_read_in_its_one_form(
    said: object, node: str | None
) -> None:
    answer = {"choices": [], "kv_transfer_params": {"kvstore": {"manifest": "x", "node": said}}}
    assert Vllm().read_prefill_answer(json.dumps(answer).encode()).node == node


def test_the_prompt_alone_goes_to_the_tokenizer(family: Vllm) -> None:
    body = json.loads(family.tokenize_body(completion(add_special_tokens=False, stop="x")))
    assert body == {"model": "m", "prompt": "Once", "add_special_tokens": False}
    body = json.loads(family.tokenize_body(chat(tools=[], max_tokens=3)))
    assert set(body) == {"model", "messages", "tools"}


def test_a_probe_asks_for_one_token(family: Vllm) -> None:
    assert json.loads(family.probe_body("m") or b"")["max_tokens"] == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 64])
def test_rooms_are_never_taken_twice_and_say_their_rank(ranks: int) -> None:
    rooms = Rooms(ranks)
    taken = [(rooms.take(number % ranks), number % ranks) for number in range(2000)]
    assert len({room for room, _ in taken}) == 2000
    assert all(0 < room < 2**63 and room % ranks == rank for room, rank in taken)


def test_a_rank_is_taken_out_of_header_lines_and_nothing_that_looks_like_it() -> None:
    given = {"baggage": "a=x-data-parallel-rank: 3", "x-data-parallel-rank": "1"}
    assert without_rank(leg_fields("r", given)) == leg_fields("r", {"baggage": given["baggage"]})


def test_an_id_of_its_own_begins_with_the_requests_and_is_never_made_twice() -> None:
    fields = leg_fields("mine", {"baggage": "x-request-id: theirs"})
    made = {with_own_id(fields) for _ in range(100)}
    assert len(made) == 100
    assert all(re.sub(rb"mine-[0-9a-f]{16}\r", b"mine\r", each) == fields for each in made)
