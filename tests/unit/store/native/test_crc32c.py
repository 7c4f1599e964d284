"""The digest of stored parts."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store import _core

POLYNOMIAL = 0x82F63B78


def reference(data: bytes, init: int = 0) -> int:
    """CRC32C bit by bit, as RFC 3720 appendix B.4 defines it."""
    crc = ~init & 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
    return ~crc & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_the_check_values_of_rfc_3720_come_out(data: bytes, crc: int) -> None:
    assert _core.crc32c(data) == crc


@given(st.binary(max_size=2000), st.integers(0, 2**32 - 1))
def test_any_bytes_give_what_the_definition_gives(data: bytes, init: int) -> None:
    assert _core.crc32c(data, init) == reference(data, init)


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_a_digest_goes_on_where_another_ended(a: bytes, b: bytes) -> None:
    whole = _core.crc32c(a + b)
    assert _core.crc32c(b, _core.crc32c(a)) == whole


@pytest.mark.parametrize("size", [0, 1, 767, 768, 12_287, 12_288, 12_289, 1 << 20])
def test_a_copy_is_digested_as_it_is_made(size: int) -> None:
    source = os.urandom(size)
    target = bytearray(size + 3)
    assert _core.copy_crc32c(target, source) == _core.crc32c(source)
    assert target == source + bytes(3)


def test_a_copy_needs_room_and_leave_to_write() -> None:
    with pytest.raises(ValueError, match="shorter"):
        _core.copy_crc32c(bytearray(1), b"ab")
    with pytest.raises(BufferError):
        _core.copy_crc32c(b"ab", b"ab")
