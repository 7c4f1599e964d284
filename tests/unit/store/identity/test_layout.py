"""Layouts: which are equal, and that they are read back."""

import pytest

from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

SPEC = CacheSpec("m", "r", "bfloat16", 16, "sha256_cbor", "00" * 32)


def part(layout: Layout, block_bytes: int = 1024) -> Part:
    return Part((0, 4), (0, 4), 0, block_bytes, layout)


@pytest.mark.parametrize("layout", [Layout.opaque("vllm-a"), Layout("of another version", "")])
def test_a_part_whose_bytes_only_its_engine_knows_has_any_size(layout: Layout) -> None:
    assert [part(layout, size).block_bytes for size in (1, 4097)] == [1, 4097]


def test_equal_layouts_have_equal_digests_and_are_read_back() -> None:
    one, two = (
        part(Layout.opaque("vllm-a", fields)) for fields in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )
    others = (
        part(Layout.opaque("vllm-b", {"a": 1, "b": 2})),
        part(Layout.opaque("vllm-a", {"a": 1})),
    )
    assert one.digest == two.digest
    assert len({each.digest for each in (one, *others)}) == 3
    whole = Manifest(SPEC, (one, others[0]))
    assert Manifest.from_doc(whole.doc) == whole
