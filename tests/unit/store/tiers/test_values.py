"""What a tier gives back is the value that was stored, or is refused."""

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.store import chain_of, manifest_of

from kvrouter_store.tiers.blocks import (
    HEADER_BYTES,
    KEY_PREFIX,
    BlockValues,
    is_intact,
    key_of,
    parent_in,
    seal,
)

NAMES = st.binary(min_size=32, max_size=32)
CONTENTS = st.binary(max_size=300)


def sealed(content: bytes, name: bytes, parent: bytes | None = None) -> bytearray:
    value = bytearray(HEADER_BYTES + len(content))
    value[HEADER_BYTES:] = content
    seal(memoryview(value), name, parent)
    return value


@given(CONTENTS, NAMES)
def test_a_sealed_value_is_intact_and_keeps_its_bytes(content: bytes, name: bytes) -> None:
    value = sealed(content, name)
    assert value[HEADER_BYTES:] == content
    assert is_intact(memoryview(value), name)


@given(CONTENTS, NAMES, st.integers(min_value=1, max_value=255), st.data())
def test_every_flipped_byte_is_refused(
    content: bytes, name: bytes, flip: int, data: st.DataObject
) -> None:
    value = sealed(content, name)
    value[data.draw(st.integers(0, len(value) - 1))] ^= flip
    assert not is_intact(memoryview(value), name)


def test_each_byte_of_the_header_is_looked_at() -> None:
    name = bytes(range(32))
    for at in range(HEADER_BYTES):
        value = sealed(b"kv", name)
        value[at] ^= 1
        assert not is_intact(memoryview(value), name), at


@given(CONTENTS, NAMES, st.none() | NAMES.filter(any))
def test_a_value_knows_the_block_before_it(
    content: bytes, name: bytes, parent: bytes | None
) -> None:
    value = memoryview(sealed(content, name, parent))
    assert is_intact(value, name)
    assert parent_in(value) == parent


@given(CONTENTS, NAMES, NAMES)
def test_a_value_of_another_name_is_refused(content: bytes, name: bytes, other: bytes) -> None:
    assert is_intact(memoryview(sealed(content, name)), other) == (name == other)


@given(CONTENTS, NAMES, st.integers(min_value=0, max_value=400))
def test_a_value_that_is_cut_or_longer_is_refused(content: bytes, name: bytes, size: int) -> None:
    value = sealed(content, name)
    other = value[:size] + bytes(max(0, size - len(value)))
    assert is_intact(memoryview(other), name) == (size == len(value))


@given(st.binary(max_size=200), NAMES)
def test_any_other_bytes_are_refused(noise: bytes, name: bytes) -> None:
    assert not is_intact(memoryview(noise), name)


def test_each_part_has_a_name_of_its_own_and_tenants_share_none() -> None:
    block = chain_of(1)
    first, second = manifest_of(parts=2), manifest_of(parts=2, model="another")
    names = [
        name
        for tenant in ("", "a", "b")
        for manifest in (first, second)
        for name in BlockValues(tenant, manifest).names(block)
    ]
    assert len(set(names)) == 12
    assert {len(name) for name in names} == {32}


def test_manifests_that_share_a_part_share_its_values() -> None:
    block = chain_of(1)
    alone, both = (BlockValues("", manifest_of(parts=parts)).names(block) for parts in (1, 2))
    assert alone == both[:1]


def test_a_key_is_readable_and_spreads_over_a_cluster() -> None:
    key = key_of(bytes(32))
    assert key == KEY_PREFIX + "0" * 64
    assert "{" not in key
