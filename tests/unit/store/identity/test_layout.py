"""Layouts: what size a part has in one, and which make no sense."""

from collections.abc import Callable

import pytest

from kvrouter_store.errors import BadDocument
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import HND, LATENT, NHD, Layout

SECRET = Layout.per_head("vllm-a", 64, {"isa": "amx"})
STATE = Layout.per_head("mamba-a", 64, state=True)


def ordered(
    order: str = HND, tokens: int = 16, elements: tuple[int, int] = (8, 8), page_bytes: int = 0
) -> Layout:
    return Layout.ordered(
        order, tokens=tokens, element_bytes=2, elements=elements, page_bytes=page_bytes
    )


def part(layout: Layout, block_bytes: int, heads: tuple[int, int] = (0, 4)) -> Part:
    return Part((0, 4), heads, 0, block_bytes, layout)


def manifest(*parts: Part, tokens: int = 16) -> Manifest:
    return Manifest(CacheSpec("m", "r", "bfloat16", tokens, "sha256_cbor", "00" * 32), parts)


@pytest.mark.parametrize(
    ("layout", "heads", "block_bytes"),
    [
        (ordered(HND), (0, 4), 4 * 4 * 16 * (8 + 8) * 2),
        (ordered(NHD, elements=(8, 6)), (2, 4), 4 * 2 * 16 * (8 + 6) * 2),
        (ordered("KLTHE"), (0, 1), 4 * 16 * (8 + 8) * 2),
        (ordered(LATENT, elements=(288, 0)), (0, 1), 4 * 16 * 288 * 2),
        (ordered("LKHE", tokens=0), (0, 4), 4 * 4 * (8 + 8) * 2),
        (ordered(HND, page_bytes=4096), (0, 4), 4 * 4096),
        (SECRET, (4, 6), 4 * 2 * 64),
        (STATE, (0, 4), 4 * 4 * 64),
    ],
)
def test_the_size_of_a_part_is_what_its_layout_says(
    layout: Layout, heads: tuple[int, int], block_bytes: int
) -> None:
    assert part(layout, block_bytes, heads).block_bytes == block_bytes
    with pytest.raises(BadDocument, match=f"has {block_bytes} bytes a block"):
        part(layout, block_bytes + 1, heads)


def test_an_opaque_part_has_any_size() -> None:
    assert [part(Layout.opaque("vllm-a"), size).block_bytes for size in (1, 4097)] == [1, 4097]


def test_equal_layouts_have_equal_digests_and_are_read_back() -> None:
    one, two = part(ordered(HND), 8192), part(ordered(HND), 8192)
    assert one.digest == two.digest != part(ordered(NHD), 8192).digest
    opaque = part(Layout.opaque("vllm-a", {"isa": "amx"}), 64, (6, 8))
    whole = manifest(one, part(SECRET, 512, (4, 6)), opaque)
    assert Manifest.from_doc(whole.doc) == whole


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ordered("HND"), "has no E"),
        (lambda: ordered("LHTE"), "has no K"),
        (lambda: ordered(HND, elements=(8, 0)), "has K"),
        (lambda: ordered(HND, tokens=0), "has T"),
        (lambda: Layout.ordered(HND, tokens=-1, element_bytes=2, elements=(8, 8)), "whole numbers"),
        (lambda: Layout("ordered", "", (("order", "LKHTE"),)), "has the fields"),
        (lambda: Layout.per_head("e", 0), "head_bytes"),
        (lambda: part(ordered(HND + "X"), 8192), "cannot be laid out so: the order must be made"),
        (lambda: part(ordered(HND + "H"), 8192), "each at most once"),
        (lambda: part(ordered("LKTE"), 8192), "leaves out an axis"),
        (lambda: part(ordered(elements=(0, 8)), 4096), "must be at least 1"),
        (lambda: part(ordered("KLHTE", page_bytes=4096), 16384), "must begin with L"),
        (lambda: part(ordered(page_bytes=2047), 4 * 2047), "a page is smaller"),
        (lambda: part(ordered("LHTEK", elements=(8, 6)), 7168), "cannot alternate"),
        (lambda: part(ordered("LTKHE"), 8192, (0, 1 << 62)), "too many bytes"),
        (lambda: part(Layout.per_head("e", 1 << 70), 1 << 74), "too many bytes"),
        (lambda: manifest(part(ordered(), 8192), tokens=32), "blocks of 16 tokens"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(BadDocument, match=why):
        make()
