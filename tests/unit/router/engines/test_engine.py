import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.conftest import Clock

from kvrouter.engines.breaker import Breaker, BreakerLimits, BreakerState
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.options.addresses import parse_address
from kvrouter_store.identity.chain import root_hash


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("  localhost:1 ", "localhost:1"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("[fe80::1]:80", "[fe80::1]:80"),
        ("HTTP://Engine-A:9", "engine-a:9"),
        ("https://engine-a:9", "https://engine-a:9"),
        ("HTTPS://[::1]:8000/", "https://[::1]:8000"),
        ("rack1-a=http://10.0.0.1:8000/", "rack1-a=10.0.0.1:8000"),
        (" A.b_1=HTTPS://engine-a:9", "A.b_1=https://engine-a:9"),
    ],
)
def test_an_engine_is_written_as_url_or_host_and_port(written: str, address: str) -> None:
    assert parse_address(written) == address


@pytest.mark.parametrize(
    "written",
    [
        "",
        "engine",
        "http://engine",
        "ftp://e:1",
        "https://e",
        "e:0",
        "e:99999",
        "e:x",
        "http://e:1/v1",
        "u@e:1",
        "http://e:1/?a=b",
        "=e:1",
        "a b=e:1",
        f"{'a' * 64}=e:1",
        "a=b=e:1",
        "a=",
    ],
)
def test_what_is_no_engine_is_refused_with_a_remedy(written: str) -> None:
    with pytest.raises(ValueError, match="give"):
        parse_address(written)


def test_an_address_of_ip_version_6_loses_its_brackets_only_as_host() -> None:
    engine = Engine("[::1]:8000", Role.PREFILL)
    assert (engine.host, engine.port, engine.url) == ("::1", 8000, "http://[::1]:8000")


def test_an_engine_for_both_legs_serves_each() -> None:
    assert Role.BOTH.serves(Role.PREFILL)
    assert Role.BOTH.serves(Role.DECODE)
    assert not Role.PREFILL.serves(Role.DECODE)


def test_without_a_root_of_its_own_an_engine_hashes_from_the_default_one() -> None:
    domain = Identity(("m",), block_tokens=32).domain
    assert domain is not None
    assert (domain.block_tokens, domain.root) == (32, root_hash(None))


def test_without_a_block_size_an_engine_has_no_hash_domain() -> None:
    assert Identity(("m",)).domain is None


def test_an_adapter_is_known_by_the_name_under_which_it_is_asked_for() -> None:
    identity = Identity(("base", "lora"), adapters=(("lora", "/adapters/lora"),))
    assert identity.adapter("lora") == ("lora", "/adapters/lora")
    assert identity.adapter("base") is None


def test_failures_in_a_row_open_the_breaker(clock: Clock) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=3))
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()


def test_a_success_between_failures_restarts_the_count(clock: Clock) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=2))
    breaker.failed()
    breaker.succeeded()
    assert not breaker.failed()
    assert breaker.allows()


def test_after_its_cooldown_a_breaker_lets_one_trial_pass(clock: Clock) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=1, cooldown_s=1.0))
    breaker.failed()
    clock.pass_s(1.0)
    assert breaker.allows()
    breaker.began()
    assert not breaker.allows()


def test_a_trial_that_succeeds_closes_the_breaker(clock: Clock) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=1, cooldown_s=1.0))
    breaker.failed()
    clock.pass_s(1.0)
    breaker.began()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_a_trial_that_fails_doubles_the_cooldown_up_to_its_bound(clock: Clock) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=1, cooldown_s=1.0, max_cooldown_s=3.0))
    breaker.failed()
    for wait_s in (1.0, 2.0, 3.0, 3.0):
        clock.pass_s(wait_s - 0.001)
        assert not breaker.allows()
        clock.pass_s(0.001)
        assert breaker.allows()
        breaker.began()
        assert breaker.failed()


def test_a_cooldown_beyond_its_bound_is_kept_and_stays_however_often_trials_fail(
    clock: Clock,
) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=1, cooldown_s=5.0, max_cooldown_s=3.0))
    for _ in range(1100):
        breaker.began()
        assert breaker.failed()
        clock.pass_s(4.999)
        assert not breaker.allows()
        clock.pass_s(0.001)
        assert breaker.allows()


def test_requests_sent_before_it_opened_do_not_lengthen_the_cooldown(clock: Clock) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=1, cooldown_s=1.0))
    breaker.failed()
    clock.pass_s(0.9)
    breaker.failed()
    clock.pass_s(0.1)
    assert breaker.allows()


def test_a_trial_whose_client_left_makes_room_for_another(clock: Clock) -> None:
    breaker = Breaker(clock, BreakerLimits(threshold=1, cooldown_s=1.0))
    breaker.failed()
    clock.pass_s(1.0)
    breaker.began()
    breaker.ended()
    assert breaker.allows()


@given(st.lists(st.sampled_from(["fail", "success", "begin", "end", "wait"]), max_size=60))
def test_whatever_happens_a_breaker_allows_again_within_its_longest_cooldown(
    events: list[str],
) -> None:
    clock = Clock()
    breaker = Breaker(clock, BreakerLimits(threshold=2, cooldown_s=1.0, max_cooldown_s=8.0))
    for event in events:
        match event:
            case "fail":
                breaker.failed()
            case "success":
                breaker.succeeded()
            case "begin":
                breaker.began()
            case "end":
                breaker.ended()
            case _:
                clock.pass_s(0.7)
        assert breaker.allows() <= (breaker.state is not BreakerState.OPEN)
    breaker.ended()
    clock.pass_s(8.0)
    assert breaker.allows()
