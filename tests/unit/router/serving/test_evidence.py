"""What is known of a prompt when its request has ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import Engine, HashDomain, Identity, Role
from kvrouter.engines.families.base import Handoff, NothingLanded
from kvrouter.fates.fate import Fate
from kvrouter.fates.history import Past
from kvrouter.fates.split import Evidence, split
from kvrouter.openai.request import Request
from kvrouter.prefix.lower import Loadable
from kvrouter.prefix.stores.base import StoreMatch
from kvrouter.routing.plan import Plan, RouteInputs, Why
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.serving.request.evidence import Witness
from kvrouter_store.identity.chain import root_hash

Json = dict[str, Any]
BLOCK, BLOCKS = 16, 8
PROMPT = BLOCKS * BLOCK + 3
WHOLE = BLOCKS * BLOCK
KNOWN = Past(WHOLE, WHOLE)


def engine(number: int, manifest: str | None = "one", block: int = BLOCK, root: str = "") -> Engine:
    named = root_hash(root or None)
    identity = Identity(("m",), block_tokens=block, manifest=manifest, root=named)
    return Engine(f"127.0.0.1:{number}", Role.BOTH, identity=identity)


@dataclass
class Store:
    """A view that knows which of its nodes are away."""

    away: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)


ONE, OTHER = engine(1), engine(2)


def witness(*, store: Store | None = None, looks: bool = True, differ: str = "") -> Witness:
    return Witness(store=cast("Any", store), looks=looks, difference=lambda one, other: differ)


def ended(
    *,
    decode: Engine = ONE,
    prefill: Engine | None = None,
    inputs: Mapping[str, Any] | None = None,
    why: Why = Why.PREFILL,
    told: int | None = 0,
    handoff: Handoff | None = None,
    past: Past = KNOWN,
    **more: Any,
) -> RequestContext:
    """A request that was answered."""
    context = RequestContext(cast("Any", SimpleNamespace()), "id", b"", Timing(1.0))
    context.timing.first_s = 2.0
    context.request = Request("completion", b"{}", {}, "m", False, 4, None, PROMPT)
    engines = {"decode": [ONE, OTHER], "block_tokens": BLOCK, "exact": True, **(inputs or {})}
    context.route.inputs = RouteInputs(PROMPT, **engines)
    context.route.plan = Plan(prefill, decode, 0, why)
    context.route.handoff = handoff
    context.outcome.count_prompt(PROMPT, told)
    context.prompt.past = past
    context.prompt.domain = HashDomain(BLOCK, root_hash(None))
    for name, value in more.items():
        owner, _, attribute = name.partition("__")
        setattr(getattr(context, owner), attribute, value)
    return context


def fates(context: RequestContext, by: Witness) -> dict[Fate, int]:
    known = by.evidence(context)
    assert known is not None
    return split(known)


def lost(context: RequestContext, by: Witness) -> Fate:
    """The one fate of all whole blocks."""
    found = fates(context, by)
    assert found.pop(Fate.TAIL) == PROMPT - WHOLE
    (fate,) = found
    return fate


blocks = st.integers(0, BLOCKS + 2)
counts = st.none() | st.integers(0, PROMPT + 5)


@given(data=st.data())
def test_fates_add_up_whatever_engines_and_store_have_and_say(data: st.DataObject) -> None:
    def drawn(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    held = st.dictionaries(st.sampled_from([ONE, OTHER]), blocks)
    handoff = Handoff(
        manifest=drawn(st.sampled_from([None, "one", "two"])),
        reused_tokens=drawn(counts),
        held_tokens=drawn(counts),
        block_tokens=drawn(st.sampled_from([0, BLOCK])),
    )
    context = ended(
        prefill=drawn(st.sampled_from([None, ONE, OTHER])),
        why=drawn(st.sampled_from(list(Why))),
        told=drawn(counts),
        handoff=drawn(st.sampled_from([None, handoff])),
        past=Past(drawn(blocks) * BLOCK, drawn(blocks) * BLOCK),
        inputs={
            "matches": drawn(held),
            "guesses": drawn(held),
            "lower": {e: Loadable(n, 0.0) for e, n in drawn(held).items()},
        },
        prompt__stored={"one": StoreMatch(drawn(blocks)), "two": StoreMatch(drawn(blocks))},
        prompt__coming_blocks=drawn(blocks),
        route__landed_blocks=drawn(st.none() | blocks),
        route__nothing_landed=drawn(st.none() | st.sampled_from(list(NothingLanded))),
    )
    store = Store(away=drawn(st.sampled_from([[], ["kv://a:1"]])))
    by = witness(store=store, looks=drawn(st.booleans()), differ="spec.root: a and b")
    found = fates(context, by)
    assert sum(found.values()) == PROMPT
    assert Fate.UNKNOWN not in found


def test_what_was_seen_and_is_nowhere_was_evicted_by_the_largest_place() -> None:
    assert lost(ended(), witness(store=Store())) is Fate.EVICTED_STORE
    alone = engine(3, None)
    assert lost(ended(decode=alone, inputs={"decode": [alone]}), witness()) is Fate.EVICTED_ENGINE


def test_what_another_engine_holds_is_told_apart_from_what_it_computes_now() -> None:
    here: Json = {"inputs": {"matches": {OTHER: BLOCKS}}}
    assert lost(ended(**here), witness()) is Fate.BUSY_ELSEWHERE
    coming: Json = {"inputs": {"guesses": {OTHER: BLOCKS}}, "prompt__coming_blocks": BLOCKS}
    assert lost(ended(**coming), witness()) is Fate.ON_ITS_WAY


def test_where_the_policy_does_not_look_affinity_is_off() -> None:
    assert lost(ended(), witness(looks=False)) is Fate.NOT_LOOKED
    alone: Json = {"inputs": {"decode": [ONE]}}
    assert lost(ended(**alone), witness(looks=False)) is Fate.EVICTED_ENGINE


@pytest.mark.parametrize(
    ("other", "differ", "fate"),
    [
        (engine(2, "two"), "spec.weights_revision: a and b", Fate.OTHER_WEIGHTS),
        (engine(2, "two"), "spec.kv_dtype: a and b", Fate.OTHER_MANIFEST),
        (engine(2, "two", block=32), "", Fate.OTHER_BLOCK_SIZE),
        (engine(2, "two", root="1"), "", Fate.OTHER_HASH),
    ],
)
def test_an_engine_that_differs_from_the_others_is_named_by_its_difference(
    other: Engine, differ: str, fate: Fate
) -> None:
    by = witness(store=Store(), differ=differ)
    assert lost(ended(decode=other, inputs={"decode": [ONE, other]}), by) is fate


def test_engines_like_most_others_are_not_blamed_for_one_that_differs() -> None:
    three: Json = {"inputs": {"decode": [ONE, engine(3), engine(2, "two")]}}
    assert lost(ended(**three), witness(store=Store())) is Fate.EVICTED_STORE


def test_what_the_store_holds_under_another_manifest_is_no_loss_of_the_store() -> None:
    stored = {"two": StoreMatch(BLOCKS)}
    by = witness(store=Store(), differ="spec.weights_revision: a and b")
    assert lost(ended(prompt__stored=stored), by) is Fate.OTHER_WEIGHTS


def test_a_store_that_is_away_is_named_by_its_node() -> None:
    assert lost(ended(), witness(store=Store(away=["kv://a:1"]))) is Fate.STORE_AWAY
    several = Store(away=["kv://a:1"], nodes=["kv://a:1", "kv://b:1"])
    assert lost(ended(), witness(store=several)) is Fate.EVICTED_STORE


def test_other_counts_of_the_engine_mean_other_tokens() -> None:
    context = ended()
    context.outcome.count_prompt(PROMPT + 1, 0)
    assert Fate.OTHER_TOKENS in fates(context, witness())


def test_a_whole_prompt_cannot_be_shared() -> None:
    assert lost(ended(why=Why.NOT_SPLITTABLE), witness()) is Fate.NOT_SHARED


@pytest.mark.parametrize(
    ("cause", "fate"),
    [
        (NothingLanded.TIMEOUT, Fate.LANDED_LATE),
        (NothingLanded.STORE_AWAY, Fate.STORE_AWAY),
        (NothingLanded.EVICTED, Fate.EVICTED_STORE),
        (NothingLanded.HOST_MEMORY, Fate.LOAD_FAILED),
    ],
)
def test_what_decode_computed_again_is_told_by_why_nothing_landed(
    cause: NothingLanded, fate: Fate
) -> None:
    done = Handoff(manifest="one", reused_tokens=0, block_tokens=BLOCK)
    context = ended(prefill=OTHER, handoff=done, route__nothing_landed=cause)
    assert lost(context, witness(store=Store())) is fate


def test_kv_that_lands_is_computed_once() -> None:
    done = Handoff(manifest="one", reused_tokens=0, block_tokens=BLOCK)
    brought: Json = {"prefill": OTHER, "handoff": done, "route__landed_blocks": BLOCKS}
    first = Past()
    assert lost(ended(told=WHOLE, past=first, **brought), witness(store=Store())) is Fate.FIRST_USE
    found = fates(ended(told=0, past=first, **brought), witness(store=Store()))
    assert found == {Fate.LOAD_FAILED: WHOLE, Fate.TAIL: 3}


def test_an_engine_that_never_tells_cached_tokens_is_believed_to_have_what_was_promised() -> None:
    by = witness()
    held: Json = {"inputs": {"matches": {ONE: BLOCKS}}}
    assert lost(ended(told=None, **held), by) is Fate.ENGINE
    assert lost(ended(told=WHOLE, **held), by) is Fate.ENGINE
    assert lost(ended(told=None, **held), by) is Fate.NOT_REPORTED  # now it is known to tell them


def test_a_request_that_was_not_answered_has_no_evidence() -> None:
    context = ended()
    context.timing.first_s, context.outcome.prompt_tokens = 0.0, None
    assert witness().evidence(context) is None


def test_a_request_without_legs_has_what_its_engine_says() -> None:
    context = ended(told=100)
    context.route.plan = None
    assert witness().evidence(context) == Evidence(
        prompt=PROMPT, cached=100, seen=PROMPT, gone=Fate.NOT_SHARED
    )
