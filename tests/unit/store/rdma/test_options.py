"""The words of InfiniStore and AIBrix for a device, and what is said of those that mean nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.rdma.options import NO_HINT, DeviceChoice, RdmaOptions

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
CHOICES = st.lists(st.tuples(NAMES, st.none() | st.integers(0, 255)), min_size=1, max_size=9)


@given(CHOICES, st.integers(-1, 255))
def test_every_device_has_its_own_gid_index_or_the_hint(
    choices: list[tuple[str, int | None]], hint: int
) -> None:
    words = [name if index is None else f"{name}:{index}" for name, index in choices]
    options = RdmaOptions(dev_name=", ".join(words), hint_gid_index=hint)
    assert options.devices() == [
        DeviceChoice(name, hint if index is None else index) for name, index in choices
    ]


def test_each_device_serves_consecutive_gpus_with_its_own_gid() -> None:
    options = RdmaOptions(dev_name="mlx5_1:6,mlx5_2:7", link_type="Ethernet")
    chosen = [options.device_of(options.rail_of(gpu, 8)) for gpu in range(8)]
    assert chosen == [DeviceChoice("mlx5_1", 6)] * 4 + [DeviceChoice("mlx5_2", 7)] * 4


@given(st.integers(1, 16), st.integers(1, 9))
def test_gpus_are_spread_evenly_over_devices_in_their_order(gpus: int, devices: int) -> None:
    options = RdmaOptions(dev_name=",".join(f"d{number}" for number in range(devices)))
    rails = [options.rail_of(gpu, gpus) for gpu in range(gpus)]
    counts = [rails.count(rail) for rail in range(min(devices, gpus))]
    assert rails == sorted(rails)
    assert (sum(counts), max(counts) - min(counts) <= 1) == (gpus, True)


def test_without_a_device_of_its_own_a_gpu_takes_its_turn_on_those_of_the_node() -> None:
    assert [RdmaOptions().rail_of(gpu, 4) for gpu in range(4)] == [0, 1, 2, 3]


def test_without_a_name_any_device_will_do() -> None:
    assert RdmaOptions().device_of(3) is None
    assert RdmaOptions(hint_gid_index=NO_HINT).devices() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dev_name": "mlx5_0,,mlx5_1"}, "'' is no device"),
        ({"dev_name": "../etc"}, "'../etc' is no device"),
        ({"dev_name": "mlx5_0:gid3"}, "'gid3' after mlx5_0 is no GID index"),
        ({"dev_name": "mlx5_0:"}, "'' after mlx5_0 is no GID index"),
        ({"dev_name": "mlx5_0:256"}, "a GID index is from 0 to 255"),
        ({"ib_port": 0}, "--ib-port is from 1 to 255, not 0"),
        ({"link_type": "ethernet"}, "--link-type is IB or Ethernet, not 'ethernet'"),
        ({"hint_gid_index": -2}, "--hint-gid-index is from 0 to 255"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(
    options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        RdmaOptions(**options)  # type: ignore[arg-type]
