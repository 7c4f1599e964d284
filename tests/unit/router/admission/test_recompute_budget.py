from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.conftest import Clock

from kvrouter.admission.held import Grant, RecomputeBudget


def test_what_exceeds_the_budget_is_refused(clock: Clock) -> None:
    budget = RecomputeBudget(100, clock)
    first = budget.take(60)
    assert first is not None
    assert budget.take(41) is None
    assert budget.take(40) is not None
    assert budget.tokens == 100


def test_a_request_larger_than_the_budget_runs_alone(clock: Clock) -> None:
    budget = RecomputeBudget(100, clock)
    huge = budget.take(1000)
    assert huge is not None
    assert budget.take(1) is None
    huge.release()
    assert budget.take(1) is not None


def test_a_prompt_that_needs_more_has_its_grant_grow(clock: Clock) -> None:
    budget = RecomputeBudget(100, clock)
    first = budget.take(40)
    assert first is not None
    assert budget.take(30, first) is budget.take(90, first) is first
    assert budget.tokens == 90
    assert budget.take(101, first) is first  # it is alone
    other = RecomputeBudget(100, clock)
    mine = other.take(40)
    assert mine is not None
    assert other.take(40) is not None
    assert other.take(61, mine) is None
    mine.release()
    first.release()
    assert (budget.tokens, other.tokens) == (0, 40)


def test_a_budget_of_nothing_refuses_everything(clock: Clock) -> None:
    assert RecomputeBudget(0, clock).take(1) is None


def test_a_refused_client_is_told_to_come_back_after_the_time_that_grants_take(
    clock: Clock,
) -> None:
    budget = RecomputeBudget(100, clock)
    assert budget.retry_after_s == 1
    for _ in range(30):
        grant = budget.take(100)
        assert grant is not None
        clock.pass_s(5.0)
        grant.release()
    assert budget.retry_after_s == 5


@given(st.lists(st.tuples(st.integers(0, 80), st.booleans()), max_size=60))
def test_tokens_granted_and_released_always_add_up(steps: list[tuple[int, bool]]) -> None:
    budget = RecomputeBudget(100, Clock())
    held: list[Grant] = []
    for tokens, release in steps:
        if release and held:
            grant = held.pop()
            grant.release()
            grant.release()
        elif (grant_or_none := budget.take(tokens)) is not None:
            held.append(grant_or_none)
        assert budget.tokens == sum(grant.tokens for grant in held)
        assert budget.tokens <= 100
