"""What two sides tell each other before they can be connected: no bad byte passes for good."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.rdma.base import LinkType, RdmaEndpoint, Region

ENDPOINTS = st.builds(
    RdmaEndpoint,
    qp_number=st.integers(0, (1 << 24) - 1),
    psn=st.integers(0, (1 << 24) - 1),
    gid=st.binary(min_size=16, max_size=16),
    lid=st.integers(0, 0xFFFF),
    mtu_code=st.integers(1, 5),
    link_type=st.sampled_from(LinkType),
    reads=st.integers(1, 255),
)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    address = draw(st.integers(0, (1 << 64) - 1))
    length = draw(st.integers(1, (1 << 64) - max(address, 1)))
    return Region(address, length, draw(st.integers(0, 0xFFFFFFFF)))


@given(ENDPOINTS)
def test_an_endpoint_is_read_as_it_was_written(endpoint: RdmaEndpoint) -> None:
    assert len(endpoint.to_bytes()) == RdmaEndpoint.SIZE
    assert RdmaEndpoint.from_bytes(endpoint.to_bytes()) == endpoint


@given(regions())
def test_a_region_is_read_as_it_was_written(region: Region) -> None:
    assert len(region.to_bytes()) == Region.SIZE
    assert Region.from_bytes(region.to_bytes()) == region


@given(
    st.binary(max_size=48)
    | st.binary(min_size=32, max_size=32)
    | st.binary(min_size=24, max_size=24)
)
def test_any_bytes_are_one_reading_or_a_value_error(data: bytes) -> None:
    for kind in (RdmaEndpoint, Region):
        try:
            made = kind.from_bytes(data)
        except ValueError:
            continue
        assert made.to_bytes() == data


@given(ENDPOINTS, st.integers(0, RdmaEndpoint.SIZE - 1), st.integers(0, 255))
def test_a_changed_byte_is_a_different_endpoint_or_none(
    endpoint: RdmaEndpoint, at: int, value: int
) -> None:
    changed = bytearray(endpoint.to_bytes())
    changed[at] = value
    try:
        made = RdmaEndpoint.from_bytes(bytes(changed))
    except ValueError:
        return
    assert (made == endpoint) == (bytes(changed) == endpoint.to_bytes())


def test_another_version_is_refused_by_its_number() -> None:
    data = bytearray(Region(4096, 1, 7).to_bytes())
    data[0] = 9
    with pytest.raises(ValueError, match="version 9 came; this side speaks 1"):
        Region.from_bytes(bytes(data))


def test_a_region_does_not_end_past_the_last_address() -> None:
    assert Region((1 << 64) - 8, 8, 1).length == 8
    with pytest.raises(ValueError, match="length"):
        Region((1 << 64) - 8, 9, 1)
