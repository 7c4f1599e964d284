"""The latency model: llm-d-inference-sim's rules."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvrouter.tools.sim.engine import LatencyModel
from kvrouter.tools.sim.settings import Duration, SimSettings


def model_of(**settings: Any) -> LatencyModel:
    return LatencyModel(SimSettings(model="m", seed=settings.pop("seed", 1), **settings))


def test_a_constant_first_token_hides_the_time_per_token() -> None:
    model = model_of(time_to_first_token="100ms", prefill_time_per_token="1s")
    assert model.prefill(4000, 0, running=1) == 0.1


def test_loaded_kv_costs_the_transfer_instead_of_a_constant_prefill() -> None:
    model = model_of(time_to_first_token="100ms", kv_cache_transfer_latency="10ms")
    assert model.transfer(4096, running=1) == 0.01
    assert model.prefill(10, 4096, running=1) == 0.0


def test_nothing_loaded_costs_no_transfer() -> None:
    assert model_of(kv_cache_transfer_latency="10ms").transfer(0, running=1) == 0.0


def test_a_prefill_per_token_counts_only_what_is_computed() -> None:
    model = model_of(prefill_overhead="10ms", prefill_time_per_token="1ms")
    assert model.prefill(100, 4000, running=1) == pytest.approx(0.11)


def test_a_full_engine_is_slower_by_the_factor_and_an_idle_one_is_not() -> None:
    model = model_of(inter_token_latency="10ms", time_factor_under_load=3.0, max_num_seqs=5)
    assert model.next_token(running=1) == pytest.approx(0.01)
    assert model.next_token(running=3) == pytest.approx(0.02)
    assert model.next_token(running=5) == pytest.approx(0.03)


@given(st.integers(), st.floats(0.001, 10))
def test_no_draw_leaves_70_percent_of_the_mean(seed: int, mean: float) -> None:
    flags = ("prefill_overhead", "prefill_time_std_dev")
    model = model_of(seed=seed, **dict.fromkeys(flags, Duration(mean)))
    assert 0.3 * mean - 1e-9 <= model.prefill(0, 0, running=1) <= 1.7 * mean + 1e-9


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("1.5s", 1.5), ("1m30s", 90), ("250us", 0.00025), ("7", 0.007), (7, 0.007)],
)
def test_a_duration_is_read_as_go_writes_it(text: str | int, seconds: float) -> None:
    assert Duration.parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-5", "1s2", "5 parsecs", "nan", "inf"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        Duration.parse(text)


def test_a_default_in_seconds_stays_in_seconds() -> None:
    assert SimSettings(model="m").store_deadline == 2.0


def test_a_spread_over_30_percent_is_refused_by_the_name_of_its_flag() -> None:
    with pytest.raises(ValidationError, match="--inter-token-latency-std-dev is more than 30"):
        SimSettings(
            model="m",
            inter_token_latency=Duration(0.01),
            inter_token_latency_std_dev=Duration(0.004),
        )


def test_a_cache_smaller_than_one_request_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValidationError, match="raise one or lower the other"):
        SimSettings(model="m", kv_cache_size=4, block_size=16, max_model_len=1000)


def test_spread_and_load_are_as_the_flags_say() -> None:
    model = model_of(
        time_to_first_token="100ms",
        time_to_first_token_std_dev="20ms",
        kv_cache_transfer_latency="10ms",
        kv_cache_transfer_latency_std_dev="2ms",
        time_factor_under_load=3.0,
        max_num_seqs=2,
    )
    assert len({model.prefill(1, 0, 1) for _ in range(10)}) == 10
    assert len({model.transfer(1, 1) for _ in range(10)}) == 10
    assert model.load_factor(2) == 3.0


def test_every_latency_flag_reaches_the_model() -> None:
    flags = [
        *("time_to_first_token", "inter_token_latency", "prefill_overhead"),
        *("prefill_time_per_token", "prefill_time_std_dev", "kv_cache_transfer_latency"),
        *("kv_cache_transfer_time_per_token", "kv_cache_transfer_time_std_dev"),
    ]
    for flag in flags:
        drawn = []
        for value in ("1ms", "2ms"):
            model = model_of(
                **{"prefill_overhead": "9ms", "kv_cache_transfer_time_per_token": "9ms"}
                | {flag: value}
            )
            drawn.append((model.prefill(1, 0, 1), model.transfer(1, 1), model.next_token(1)))
        assert drawn[0] != drawn[1], flag
