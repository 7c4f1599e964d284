"""Which of several RDMA devices the parts of an engine use, by the GPUs that they stand for."""

from types import SimpleNamespace

import pytest

from kvrouter_store.connectors.vllm_tier.identity import gpus_of


@pytest.mark.parametrize(
    ("engine", "group", "gpus", "expected"),
    [
        ((0, 8, 1), (0, 1), 8, (0, 8)),
        ((5, 8, 1), (0, 1), 8, (5, 8)),
        ((13, 16, 1), (0, 1), 8, (5, 8)),  # on the second of two hosts
        ((1, 2, 4), (0, 1), 8, (1, 2)),  # four GPUs each
        ((0, 1, 8), (1, 2), 8, (1, 2)),  # groups of one engine
        ((3, 4, 1), (1, 2), 4, (7, 8)),
        ((1, 2, 4), (0, 1), 1, (0, 1)),  # each engine sees its own alone
        ((1, 2, 1), (0, 1), 0, (1, 2)),  # no GPU
    ],
)
def test_engines_and_their_groups_share_the_gpus_of_their_host(
    engine: tuple[int, int, int], group: tuple[int, int], gpus: int, expected: tuple[int, int]
) -> None:
    index, size, world = engine
    parallel = SimpleNamespace(data_parallel_index=index, data_parallel_size=size, world_size=world)
    number, groups = group
    assert gpus_of(parallel, groups, gpus)[number] == expected
