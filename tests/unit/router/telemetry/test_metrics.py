"""The page of metrics is made from the code, and no page names a metric that does not exist."""

import re
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.serving.request.context import Timing
from kvrouter.serving.request.summary import parts_of
from kvrouter.telemetry.metrics import PARTS, Metrics
from kvrouter.telemetry.series import TTFT_BUCKETS, Histogram
from kvrouter.tools.docs.metrics import metrics_page, router_rows, simulator_rows, store_rows

ROOT = Path(__file__).resolve().parents[4]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
NAMED = re.compile(r"\b(kvrouter|kvstore|kvsim):(?!local\b)([a-z][a-z_]+[a-z])(?![\w.*])")
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


@pytest.mark.parametrize(
    ("times", "until_s", "parts"),
    [
        ({}, 11.0, (0, 0, 1, 0, 0, 0)),
        ({"waited_s": 0.5}, 10.5, (0.5, 0, 0, 0, 0, 0)),
        (
            {"waited_s": 1, "tokenising_s": 2, "planned_s": 15, "prefilled_s": 20, "landed_s": 21},
            25.0,
            (1, 2, 2, 5, 1, 4),
        ),
        ({"planned_s": 11}, 14.0, (0, 0, 1, 0, 0, 3)),
        ({"planned_s": 11, "prefilled_s": 19, "landed_s": 19.5}, 12.0, (0, 0, 1, 1, 0, 0)),
        ({"planned_s": 11, "prefilled_s": 13, "landed_s": 12}, 14.0, (0, 0, 1, 2, 0, 1)),
        ({"planned_s": 13, "prefilled_s": 14}, 12.0, (0, 0, 2, 0, 0, 0)),
    ],
    ids=["not planned", "waited", "all", "decode alone", "answered first", "landed first", "left"],
)
def test_parts_follow_each_other_and_add_up(
    times: dict[str, float], until_s: float, parts: tuple[float, ...]
) -> None:
    found = parts_of(Timing(10.0, **times), until_s)
    assert found == parts
    assert sum(found) == until_s - 10.0
    assert len(PARTS) == len(found)


@given(
    times=st.lists(st.floats(0, 1e4), min_size=4, max_size=4),
    waited_s=st.floats(0, 10),
    took_s=st.floats(0, 2e4),
)
def test_parts_of_any_request_add_up_to_its_time(
    times: list[float], waited_s: float, took_s: float
) -> None:
    names = ("planned_s", "prefilled_s", "landed_s", "tokenising_s")
    found = parts_of(Timing(10.0, waited_s, **dict(zip(names, times, strict=True))), took_s)
    assert sum(found) == pytest.approx(took_s - 10.0, abs=1e-6)
    assert min(found[3:]) >= 0


@given(st.lists(st.floats(-1, 3, allow_nan=False)))
def test_a_histogram_counts_as_prometheus_own(values: list[float]) -> None:
    bounds = [0.0, 0.5, 2.0]
    ours, theirs = (
        Histogram("a", "help", bounds),
        prometheus_client.Histogram("a", "help", registry=None, buckets=bounds),
    )
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (family,) = theirs.collect()
    expected = {s.labels["le"]: s.value for s in family.samples if s.name == "a_bucket"}
    assert dict(ours.rows()) == expected
    assert ours.buckets.sum == pytest.approx(sum(values))


def test_a_histogram_of_parts_is_one_family_with_cumulative_buckets() -> None:
    metrics = Metrics()
    metrics.ttft_parts.observe((0.0, 0.5, 0.1, 0.0, 0.0, 3.0))
    page = metrics.page().decode()
    name = "kvrouter:time_to_first_token_part_seconds"
    assert page.count(f"# TYPE {name} histogram") == 1
    assert f'{name}_bucket{{le="+Inf",part="tokenise"}} 1.0' in page
    assert f'{name}_bucket{{le="0.25",part="tokenise"}} 0.0' in page
    assert f'{name}_sum{{part="decode"}} 3.0' in page
    assert page.count(f"{name}_bucket") == len(PARTS) * (len(TTFT_BUCKETS) + 1)


async def test_the_page_of_metrics_is_up_to_date() -> None:
    page = metrics_page(await router_rows())
    how = "python -m kvrouter.tools.docs.metrics > docs/metrics.md"
    assert (ROOT / "docs" / "metrics.md").read_text() == page, how


async def test_every_metric_that_the_code_registers_is_on_the_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    literal = re.compile(r"""["'](kvrouter:[a-z_]+)["']""")
    sources = [path.read_text() for path in (ROOT / "router").rglob("*.py")]
    registered = {name for source in sources for name in literal.findall(source)}
    assert len(registered) > 20
    assert {n for n in registered if f"`{n}`" not in page and f"`{n}_total`" not in page} == set()


async def test_every_metric_named_in_a_page_exists() -> None:
    rows = [*await router_rows(), *store_rows(), *simulator_rows()]
    names = {row.name for row in rows}
    names |= {row.name + end for row in rows if row.kind == "histogram" for end in OF_HISTOGRAMS}
    named = {
        f"{prefix}:{name}" for path in PAGES for prefix, name in NAMED.findall(path.read_text())
    }
    assert len(named) > 80
    assert named - names == set()


async def test_a_name_stands_once_and_says_its_unit() -> None:
    rows = [*await router_rows(), *store_rows(), *simulator_rows()]
    assert len({row.name for row in rows}) == len(rows)
    times = [row.name for row in rows if row.kind == "histogram"]
    assert [name for name in times if not name.endswith(("_seconds", "_tokens"))] == []
    assert [row.name for row in rows if not row.help] == []
