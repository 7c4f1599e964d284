"""The contract that every policy keeps, and what is particular to each."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.compatibility import shares
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.prefix.lower import Loadable
from kvrouter.routing.plan import RouteInputs, held_tokens, missing_tokens
from kvrouter.routing.policies import POLICIES, make_policy
from kvrouter.routing.policies.prefix import DECODE_COST, LOAD_COST, pricing

if TYPE_CHECKING:
    from kvrouter.routing.policies.base import Policy

NAMES = sorted(POLICIES)
MANIFESTS = (None, "x", "y")
PRICED = ("least_tokens", "prefix")


def engine(port: int, role: Role, tokens: int = 0, manifest: str | None = None) -> Engine:
    made = Engine(f"e:{port}", role, tokens=tokens)
    made.identity = Identity(("m",), manifest=manifest)
    return made


@st.composite
def inputs(draw: st.DrawFn) -> RouteInputs:
    def engines(role: Role, least: int) -> list[Engine]:
        specs = st.tuples(st.integers(0, 100_000), st.sampled_from(MANIFESTS))
        drawn = draw(st.lists(specs, min_size=least, max_size=5))
        return [engine(port, role, *spec) for port, spec in enumerate(drawn, 1)]

    decode, prefill = engines(Role.DECODE, 1), engines(Role.PREFILL, 0)
    blocks = st.integers(0, 40)
    return RouteInputs(
        prompt_tokens=draw(st.integers(1, 600)),
        decode=decode,
        prefill=prefill,
        exact=draw(st.booleans()),
        block_tokens=draw(st.sampled_from([0, 16])),
        matches={e: draw(blocks) for e in [*decode, *prefill] if draw(st.booleans())},
        store_blocks={"x": draw(blocks)},
        prefill_threshold=draw(st.integers(0, 300)),
        split=draw(st.booleans()),
    )


@pytest.mark.parametrize("name", NAMES)
@given(request=inputs())
def test_every_policy_chooses_among_the_candidates_and_splits_by_one_rule(
    name: str, request: RouteInputs
) -> None:
    plan = make_policy(name).plan(request)
    assert plan.decode in request.decode
    assert plan.missing_tokens == missing_tokens(request, plan.decode)
    able = [e for e in request.prefill if e is not plan.decode and shares(e, plan.decode)]
    wanted = request.split and plan.missing_tokens > request.prefill_threshold
    assert (plan.prefill is not None) == (wanted and bool(able))
    if plan.prefill is not None:
        assert plan.prefill in able


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("computing", "held", "alone"), [(0, 0, True), (6, 0, True), (7, 0, False), (900, 3, True)]
)
def test_a_decode_engine_computes_no_more_prompt_tokens_at_a_time_than_the_threshold(
    name: str, computing: int, held: int, alone: bool
) -> None:
    decode, prefill = engine(1, Role.DECODE), engine(2, Role.PREFILL)
    decode.computing_tokens = computing
    request = RouteInputs(
        49,
        [decode],
        [prefill],
        exact=True,
        block_tokens=16,
        matches={decode: held},
        prefill_threshold=54,
    )
    assert make_policy(name).plan(request).why == ("little missing" if alone else "prefill")


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_says_why_in_words_of_a_bounded_set(name: str) -> None:
    policy = make_policy(name)
    d, p = engine(1, Role.DECODE, manifest="x"), engine(2, Role.PREFILL, manifest="x")
    other = engine(3, Role.PREFILL, manifest="y")
    assert policy.plan(RouteInputs(50, [d], [p])).why == "prefill"
    assert policy.plan(RouteInputs(50, [d], [p], prefill_threshold=50)).why == "little missing"
    assert policy.plan(RouteInputs(50, [d])).why == "no prefill engine"
    assert policy.plan(RouteInputs(50, [d], [other])).why == "manifests differ"
    assert policy.plan(RouteInputs(50, [d], [p], split=False)).why == "not splittable"
    assert policy.plan(RouteInputs(50, [d], [d])).why == "same engine"
    silent = engine(4, Role.DECODE)
    silent.identity = Identity(("m",), manifest="x", refusal="sliding window")
    assert policy.plan(RouteInputs(50, [silent], [p])).why == "shares no KV"


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_spreads_equal_requests_over_equal_engines(name: str) -> None:
    policy: Policy = make_policy(name)
    decode = [engine(n, Role.DECODE) for n in range(1, 4)]
    prefill = [engine(n, Role.PREFILL) for n in range(4, 7)]
    plans = [policy.plan(RouteInputs(100, decode, prefill)) for _ in range(6)]
    assert {plan.decode for plan in plans} == set(decode)
    assert {plan.prefill for plan in plans} == set(prefill)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_bears_engines_that_come_and_go(name: str) -> None:
    policy = make_policy(name)
    first, second = engine(1, Role.DECODE), engine(2, Role.DECODE)
    policy.plan(RouteInputs(10, [first, second]))
    assert policy.plan(RouteInputs(10, [second])).decode is second


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=6), turns=st.integers(0, 7))
def test_least_tokens_takes_an_engine_with_the_fewest_tokens(loads: list[int], turns: int) -> None:
    policy = make_policy("least_tokens")
    decode = [engine(n, Role.DECODE, load) for n, load in enumerate(loads, 1)]
    for _ in range(turns):
        policy.plan(RouteInputs(1, decode))
    assert policy.plan(RouteInputs(1, decode)).decode.tokens == min(loads)


@pytest.mark.parametrize("name", NAMES)
@given(request=inputs(), data=st.data(), own=st.integers(0, 1000))
def test_a_decode_leg_is_bound_again_only_to_a_better_candidate(
    name: str, request: RouteInputs, data: st.DataObject, own: int
) -> None:
    gone = engine(99, Role.DECODE)
    bound = data.draw(st.sampled_from([*request.decode, gone]))
    bound.tokens += own
    chosen = make_policy(name).rebind(request, request.decode, bound, own)
    bound.tokens -= own
    assert chosen in request.decode
    if name == "round_robin":
        assert chosen is bound or bound is gone
        return
    if name not in PRICED:
        return
    saved = LOAD_COST * request.block_tokens if name == "prefix" else 0
    prices = {e: e.tokens - saved * request.matches.get(e, 0) for e in request.decode}
    assert prices[chosen] == min(prices.values())
    if bound is not gone and prices[bound] == prices[chosen]:
        assert chosen is bound


def at_node(port: int, role: Role, node: str) -> Engine:
    made = engine(port, role)
    made.identity = Identity(("m",), node=node)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_prefills_where_the_store_node_is_away(name: str) -> None:
    policy = make_policy(name)
    here, gone = (at_node(port, Role.PREFILL, f"kv://n:{port}") for port in (1, 2))
    decode = [at_node(3, Role.DECODE, "kv://n:1")]
    request = RouteInputs(48, decode, [here, gone], away=["kv://n:2"])
    assert [policy.plan(request).prefill for _ in range(3)] == [here] * 3
    alone = policy.plan(RouteInputs(48, decode, [gone], away=["kv://n:2"]))
    assert (alone.prefill, alone.why) == (None, "no prefill engine")
    gone.family = "nixl"  # which needs no store
    decode[0].family = "nixl"
    assert policy.plan(request).prefill is gone


@pytest.mark.parametrize("name", ["least_tokens", "prefix"])
def test_a_decode_engine_whose_store_node_is_away_costs_the_whole_prompt_more(name: str) -> None:
    policy = make_policy(name)
    here, gone = (at_node(port, Role.DECODE, f"kv://n:{port}") for port in (1, 2))
    request = RouteInputs(48, [gone, here], away=["kv://n:2"])
    assert [policy.plan(request).decode for _ in range(3)] == [here] * 3
    assert policy.rebind(request, [gone, here], gone, 0) is here
    here.tokens = here.computing_tokens = 500
    assert policy.plan(request).decode is gone


def test_prefix_prefers_the_engine_that_holds_more() -> None:
    decode = [engine(n, Role.DECODE) for n in range(1, 4)]
    matches = {decode[0]: 1, decode[1]: 5, decode[2]: 3}
    request = RouteInputs(160, decode, exact=True, block_tokens=16, matches=matches)
    policy = make_policy("prefix")
    assert {policy.plan(request).decode for _ in range(5)} == {decode[1]}


def test_prefix_chooses_by_guesses_too_but_does_not_skip_a_leg_by_them() -> None:
    first, second = engine(1, Role.DECODE), engine(2, Role.DECODE)
    prefill = engine(3, Role.PREFILL)
    request = RouteInputs(
        160, [first, second], [prefill], exact=True, block_tokens=16, guesses={second: 9}
    )
    policy = make_policy("prefix")
    plans = [policy.plan(request) for _ in range(4)]
    assert {plan.decode for plan in plans} == {second}
    assert {plan.prefill for plan in plans} == {prefill}
    assert plans[0].missing_tokens == 144


def test_prefix_believes_a_guess_that_goes_beyond_what_is_known() -> None:
    first, second = engine(1, Role.DECODE), engine(2, Role.DECODE)
    request = RouteInputs(
        160,
        [first, second],
        exact=True,
        block_tokens=16,
        matches={first: 5, second: 4},
        guesses={first: 2, second: 9},
    )
    assert make_policy("prefix").plan(request).decode is second


def test_prefix_leaves_a_holder_whose_queue_is_longer_than_computing() -> None:
    holder, idle = engine(1, Role.DECODE, tokens=1000), engine(2, Role.DECODE)
    prefill = [engine(3, Role.PREFILL)]
    request = RouteInputs(
        160, [holder, idle], prefill, exact=True, block_tokens=16, matches={holder: 9}
    )
    assert make_policy("prefix").plan(request).decode is idle


def test_prefix_counts_blocks_in_the_store_as_cheap_but_not_free() -> None:
    holder = engine(1, Role.DECODE, manifest="x")
    loader = engine(2, Role.DECODE, manifest="x")
    stranger = engine(3, Role.DECODE, manifest="y")
    request = RouteInputs(
        161,
        [holder, loader, stranger],
        exact=True,
        block_tokens=16,
        matches={holder: 10},
        store_blocks={"x": 10},
    )
    prices = [pricing(request)(e) for e in request.decode]
    assert prices == [-160, -160 + 160 * LOAD_COST, 0]


def test_prefix_counts_blocks_in_host_memory_as_loads_of_an_engine_alone() -> None:
    holder, loader, stranger = decode = [engine(n, Role.DECODE) for n in (1, 2, 3)]
    request = RouteInputs(
        161,
        decode,
        exact=True,
        block_tokens=16,
        matches={holder: 6, loader: 4},
        lower={loader: Loadable(10, 6 * 0.2)},
        guesses={stranger: 8},
    )
    prices = [pricing(request)(e) for e in decode]
    assert prices == pytest.approx([-96, -160 + 96 * 0.2, -128])
    assert make_policy("prefix").plan(request).decode is loader
    loader.computing_tokens = 14  # what another engine holds costs less than to wait
    assert make_policy("prefix").plan(request).decode is stranger


def test_an_engine_that_can_load_a_prompt_from_host_memory_needs_no_prefill_leg() -> None:
    decode, prefill = engine(1, Role.DECODE), engine(2, Role.PREFILL)
    request = RouteInputs(161, [decode], [prefill], exact=True, block_tokens=16)
    assert make_policy("prefix").plan(request).why == "prefill"
    held = replace(request, lower={decode: Loadable(10, 2.0)})
    assert make_policy("prefix").plan(held).why == "little missing"
    at_prefill = make_policy("prefix").plan(replace(request, lower={prefill: Loadable(8, 1.6)}))
    assert (at_prefill.why, at_prefill.computed_tokens) == ("prefill", 33)


def cost(request: RouteInputs, engine: Engine) -> float:
    """The definition: the load, plus tokens to compute, plus LOAD_COST of those to load."""
    reachable = held_tokens(request, engine)
    own = held_tokens(replace(request, store_blocks={}), engine)
    load: float = engine.tokens
    if not (request.prefill and request.split):  # it computes the prompt itself
        load = engine.computing_tokens + DECODE_COST * engine.tokens
    return load + (request.prompt_tokens - reachable) + LOAD_COST * (reachable - own)


@given(request=inputs())
def test_prefix_never_takes_a_costlier_engine(request: RouteInputs) -> None:
    plan = make_policy("prefix").plan(request)
    least = min(cost(request, e) for e in request.decode)
    assert cost(request, plan.decode) == pytest.approx(least, abs=1e-6)
