"""How much host memory an engine takes, by what its host has."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.connectors.vllm import host_memory
from kvrouter_store.connectors.vllm.host_memory import (
    LEAST_BYTES,
    PROMPTS,
    STEPS,
    Host,
    agreed,
    end_agreement,
    kv_bytes,
    size_beside_store,
    size_for,
)

GIB = 1 << 30
LARGE = Host(free=400 * GIB, shared=400 * GIB, devices=0)


@pytest.mark.parametrize(
    ("longest", "ranks", "host", "expected"),
    [
        (GIB, 1, LARGE, 100 * GIB),  # a quarter
        (20 * GIB, 1, LARGE, 160 * GIB),  # eight of the longest prompts
        (GIB, 1, LARGE._replace(devices=8), 100 * GIB // 8),  # its share of a host of 8 GPUs
        (GIB, 4, LARGE._replace(devices=8), 50 * GIB),
        (2 * GIB, 1, LARGE._replace(devices=8), 16 * GIB),
        (40 * GIB, 1, LARGE, 200 * GIB),  # half of what is free, and no more
        (GIB, 1, LARGE._replace(shared=4 * GIB), 3 * GIB),
        (1 << 20, 1, Host(GIB // 2, GIB, 0), LEAST_BYTES),
    ],
)
def test_an_engine_takes_its_share_or_room_for_several_of_the_longest_prompts(
    longest: int, ranks: int, host: Host, expected: int
) -> None:
    assert size_for(longest, ranks, host) == expected


@given(
    longest=st.integers(1, 100 * GIB),
    ranks=st.integers(1, 8),
    host=st.builds(
        Host, st.integers(GIB, 2000 * GIB), st.integers(GIB, 2000 * GIB), st.integers(0, 8)
    ),
)
def test_it_never_takes_more_than_half_of_the_host(longest: int, ranks: int, host: Host) -> None:
    size = size_for(longest, ranks, host)
    assert LEAST_BYTES <= size <= max(LEAST_BYTES, min(host.free // 2, host.shared * 3 // 4))


@pytest.mark.parametrize(
    ("step", "host", "expected"),
    [
        (GIB, LARGE, STEPS * GIB),
        (GIB, LARGE._replace(devices=8), STEPS * GIB),
        (1 << 20, LARGE, LEAST_BYTES),
        (GIB, LARGE._replace(shared=4 * GIB), 3 * GIB),
        (60 * GIB, LARGE, 200 * GIB),
    ],
)
def test_beside_a_store_on_its_host_an_engine_takes_what_a_few_steps_compute(
    step: int, host: Host, expected: int
) -> None:
    assert size_beside_store(step, 1, host) == expected


def test_one_sentence_says_where_eight_prompts_do_not_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvstore"):
        size_for(GIB, 1, LARGE)
        assert not caplog.records
        size_for(GIB, 1, LARGE._replace(shared=8 * GIB))
    (said,) = caplog.messages
    assert "6.0 of the longest prompts instead of 8" in said
    assert "--shm-size" in said


def test_all_processes_of_an_engine_take_what_its_first_one_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_memory, "SHARED", tmp_path)
    found = [agreed("engine", lambda size=size: size) for size in (3, 2, 1)]  # type: ignore[misc]
    assert found == [3, 3, 3]
    assert agreed("another", lambda: 5) == 5
    for name in ("engine", "another", "engine"):
        end_agreement(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (3, 1), (1, 4)])
def test_the_longest_prompt_is_counted_with_all_its_groups_and_ranks(
    groups: int, ranks: int
) -> None:
    configuration = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=ranks),
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    cache = SimpleNamespace(
        num_blocks=100,
        kv_cache_groups=[group] * groups,
        kv_cache_tensors=[SimpleNamespace(size=100 << 20)],
    )
    assert kv_bytes(configuration, cache, 8190) == groups * ranks * 512 << 20
    assert PROMPTS == 8
