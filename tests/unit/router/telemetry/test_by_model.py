"""Series by model: each model has its own, and their number is bounded."""

from kvrouter.telemetry.by_model import MAX_MODELS, OTHER_MODELS
from kvrouter.telemetry.metrics import Metrics


def rows(metrics: Metrics, name: str) -> list[str]:
    page = metrics.page().decode()
    return [row for row in page.splitlines() if row.startswith(f"kvrouter:{name}{{")]


def test_each_model_has_its_own_series() -> None:
    metrics = Metrics()
    metrics.of("a").ttft.observe(0.1)
    metrics.of("b").ttft.observe(0.1)
    metrics.of("b").ttft.observe(0.1)
    assert rows(metrics, "time_to_first_token_seconds_count") == [
        'kvrouter:time_to_first_token_seconds_count{model="a"} 1.0',
        'kvrouter:time_to_first_token_seconds_count{model="b"} 2.0',
    ]


def test_models_beyond_the_bound_share_a_label_and_those_before_keep_theirs() -> None:
    metrics = Metrics()
    for number in range(2 * MAX_MODELS):
        metrics.of(f"m{number}").generation_tokens += 1
    metrics.of("m0").generation_tokens += 1
    counted = rows(metrics, "generation_tokens_total")
    assert len(counted) == MAX_MODELS + 1
    assert 'kvrouter:generation_tokens_total{model="m0"} 2.0' in counted
    other = f'kvrouter:generation_tokens_total{{model="{OTHER_MODELS}"}} {float(MAX_MODELS)}'
    assert other in counted


def test_an_unknown_model_is_never_another_one() -> None:
    metrics = Metrics()
    for number in range(2 * MAX_MODELS):
        metrics.of(f"m{number}")
    assert metrics.of("").label == ""
