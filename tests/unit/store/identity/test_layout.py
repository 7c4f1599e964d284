"""Layouts: what size a part has in one, and which make no sense."""

from collections.abc import Callable

import pytest

from kvrouter_store.errors import BadDocument
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

SECRET = Layout.per_head("vllm-a", 64, {"isa": "amx"})


def part(layout: Layout, block_bytes: int, heads: tuple[int, int] = (0, 4)) -> Part:
    return Part((0, 4), heads, 0, block_bytes, layout)


def manifest(*parts: Part) -> Manifest:
    return Manifest(CacheSpec("m", "r", "bfloat16", 16, "sha256_cbor", "00" * 32), parts)


@pytest.mark.parametrize("heads", [(0, 4), (4, 6)])
def test_the_size_of_a_part_is_what_its_layout_says(heads: tuple[int, int]) -> None:
    block_bytes = 4 * (heads[1] - heads[0]) * 64
    assert part(SECRET, block_bytes, heads).block_bytes == block_bytes
    with pytest.raises(BadDocument, match=f"has {block_bytes} bytes a block"):
        part(SECRET, block_bytes + 1, heads)


@pytest.mark.parametrize("layout", [Layout.opaque("vllm-a"), Layout("of another version", "")])
def test_a_part_whose_bytes_only_its_engine_knows_has_any_size(layout: Layout) -> None:
    assert [part(layout, size).block_bytes for size in (1, 4097)] == [1, 4097]


def test_equal_layouts_have_equal_digests_and_are_read_back() -> None:
    one, two = part(SECRET, 1024), part(Layout.per_head("vllm-a", 64, {"isa": "amx"}), 1024)
    assert one.digest == two.digest != part(Layout.per_head("vllm-b", 64), 1024).digest
    opaque = part(Layout.opaque("vllm-a", {"isa": "amx"}), 64, (6, 8))
    whole = manifest(part(SECRET, 512, (4, 6)), opaque)
    assert Manifest.from_doc(whole.doc) == whole


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Layout.per_head("e", 0), "head_bytes"),
        (lambda: Layout("opaque per head", "e", (("head_bytes", True),)), "head_bytes"),
        (lambda: part(Layout.per_head("e", 1 << 70), 1 << 74), "too many bytes"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(BadDocument, match=why):
        make()
