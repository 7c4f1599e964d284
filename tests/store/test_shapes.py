"""What fits what: layouts, the blocks that a length needs, and what is refused with which words."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore._core import Segments
from kvstore.block import CacheSpec, Manifest, Part
from kvstore.copy_plan import CopyPlan, heads_of_rank, reach_of
from kvstore.errors import BadDocument, CannotMap
from kvstore.layout import HND, LATENT, NHD, Layout

PAGE = Path(__file__).parents[2] / "docs" / "shapes.md"
LAYERS, HEADS, HEAD_BYTES = 4, 4, 16


def spec(tokens: int = 16, group: str = "full_attention", **changes: Any) -> CacheSpec:
    plain = CacheSpec("m", "r", "bfloat16", tokens, "sha256_cbor", "00" * 32, (group,))
    return dataclasses.replace(plain, **changes)


def ordered(order: str = HND, tokens: int = 16, elements: tuple[int, int] = (8, 8)) -> Layout:
    return Layout.ordered(order, tokens=tokens, element_bytes=2, elements=elements)


def part(
    layout: Layout, layers: tuple[int, int] = (0, LAYERS), heads: tuple[int, int] = (0, HEADS)
) -> Part:
    """A part of the right size for its layout; 64 bytes where that is not known."""
    shape = layout.shape(layers, heads)
    return Part(layers, heads, 0, shape.block_bytes if shape else 64, layout)


def manifest(spec: CacheSpec, *parts: Part) -> Manifest:
    return Manifest(spec, parts)


def by_rank(layout: Layout, ranks: int, spec: CacheSpec) -> Manifest:
    ranges = sorted({heads_of_rank(HEADS, ranks, rank) for rank in range(ranks)})
    return manifest(spec, *(part(layout, heads=each) for each in ranges))


def plan(
    stored: Layout,
    wanted: Layout,
    stored_spec: CacheSpec | None = None,
    wanted_spec: CacheSpec | None = None,
) -> CopyPlan:
    first, second = stored_spec or spec(), wanted_spec or spec()
    return CopyPlan(manifest(first, part(stored)), manifest(second, part(wanted)), 0)


SECRET = Layout.per_head("vllm-a", 64, {"isa": "amx"})
STATE = Layout.per_head("mamba-a", 64, state=True)
NARROW = Layout.opaque("vllm-a", {"isa": "amx"})

# What is tried, and the attempt; the page tells the sentence of each.
REFUSALS: dict[str, Callable[[], object]] = {
    "other weights": lambda: plan(ordered(), ordered(), spec(weights_revision="s")),
    "another KV dtype": lambda: plan(ordered(), ordered(), spec(kv_dtype="fp8_e4m3")),
    "other names of blocks": lambda: plan(ordered(), ordered(), spec(root="11" * 32)),
    "another kind of cache group": lambda: plan(ordered(), ordered(), spec(group="mamba")),
    "a head of another size": lambda: plan(ordered(elements=(16, 16)), ordered()),
    "6 KV heads on 4 ranks": lambda: heads_of_rank(6, 4, 0),
    "layers that nobody stored": lambda: CopyPlan(
        manifest(spec(), part(ordered(), layers=(0, 2))), manifest(spec(), part(ordered())), 0
    ),
    "KV heads that nobody stored": lambda: CopyPlan(
        manifest(spec(), part(ordered(), heads=(2, 4))), manifest(spec(), part(ordered())), 0
    ),
    "blocks of 48 and of 32 tokens": lambda: plan(
        ordered(tokens=48), ordered(tokens=32), spec(48), spec(32)
    ),
    "opaque blocks of 16 tokens for an engine with 64": lambda: plan(
        SECRET, SECRET, spec(16), spec(64)
    ),
    "another instruction set": lambda: plan(Layout.per_head("vllm-a", 64, {"isa": "vec"}), SECRET),
    "opaque parts of two ranks for one": lambda: CopyPlan(
        by_rank(NARROW, 2, spec()), by_rank(NARROW, 1, spec()), 0
    ),
    "opaque bytes for an ordered layout": lambda: plan(SECRET, ordered()),
    "a window of unknown size": lambda: plan(
        ordered(), ordered(), spec(group="sliding_window"), spec(group="sliding_window")
    ),
    "a kind of cache group that is not known": lambda: reach_of("chunked_local_attention"),
    "a state in the place of attention": lambda: plan(STATE, STATE),
    "100 tokens of blocks of 16 and 64": lambda: plan(
        ordered(), ordered(tokens=64), spec(16), spec(64)
    ).needed(100),
    "a state after 16 tokens, of blocks of 64": lambda: plan(
        STATE, STATE, spec(64, "mamba"), spec(16, "mamba")
    ).source_blocks(range(1)),
}


def told() -> dict[str, str]:
    """Each refusal's sentence."""
    found = {}
    for name, attempt in REFUSALS.items():
        with pytest.raises(CannotMap) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def test_the_page_tells_what_is_refused_in_the_words_that_are_used() -> None:
    rows = [f"| {name} | {sentence} |" for name, sentence in told().items()]
    table = PAGE.read_text().split("| what is tried | the reason given |\n|---|---|\n", 1)[1]
    assert table.split("\n\n", 1)[0].splitlines() == rows, "\n".join(rows)


def test_a_refusal_is_one_sentence() -> None:
    assert [text for text in told().values() if not re.fullmatch(r"[^\n]{20,160}", text)] == []


@pytest.mark.parametrize("wanted", [1, 2, 4, 8])
@pytest.mark.parametrize("stored", [1, 2, 4, 8])
def test_a_rank_reads_only_parts_that_have_its_heads(stored: int, wanted: int) -> None:
    source, target = by_rank(ordered(), stored, spec()), by_rank(ordered(NHD), wanted, spec())
    for number, each in enumerate(target.parts):
        reads = CopyPlan(source, target, number).reads
        first, end = each.kv_heads
        assert [source.parts[n].kv_heads for n in reads] == [
            part.kv_heads
            for part in source.parts
            if part.kv_heads[0] < end > 0
            if first < part.kv_heads[1]
        ]


def test_pipeline_stages_may_be_cut_elsewhere() -> None:
    source = manifest(spec(), *(part(ordered(), layers=each) for each in ((0, 1), (1, 4))))
    target = manifest(spec(), *(part(ordered(), layers=each) for each in ((0, 2), (2, 4))))
    assert [CopyPlan(source, target, number).reads for number in (0, 1)] == [(0, 1), (1,)]


def test_a_latent_vector_is_stored_once_for_all_ranks() -> None:
    latent = ordered(LATENT, elements=(288, 0))
    mla = spec(group="mla_attention")
    stored = manifest(mla, part(latent, heads=(0, 1)))
    assert CopyPlan(stored, stored, 0).least_run_bytes == LAYERS * 16 * 288 * 2
    wanted = spec(64, "mla_attention")
    larger = manifest(wanted, part(ordered(LATENT, 64, (288, 0)), heads=(0, 1)))
    assert CopyPlan(stored, larger, 0).source_blocks(range(1, 2)) == range(4, 8)


def test_blocks_of_other_size_are_made_of_the_same_tokens() -> None:
    gather = plan(ordered(), ordered(tokens=64), spec(16), spec(64))
    assert gather.boundary_tokens == 64
    assert gather.needed(192) == (range(12), range(3))
    split = plan(ordered(tokens=64), ordered(), spec(64), spec(16))
    assert split.boundary_tokens == 64
    assert split.needed(128) == (range(2), range(8))
    assert split.source_blocks(range(3, 5)) == range(2)
    assert split.source_blocks(range(5, 5)) == range(0)


@pytest.mark.parametrize(
    ("tokens", "window", "first"), [(256, 64, 12), (256, 65, 12), (256, 66, 11), (256, 1, 16)]
)
def test_of_a_sliding_window_only_the_last_one_is_needed(
    tokens: int, window: int, first: int
) -> None:
    sliding = spec(group=f"sliding_window:{window}")
    needed = plan(ordered(), ordered(NHD), sliding, sliding).needed(tokens)
    assert needed == (range(first, 16), range(first, 16))
    assert plan(ordered(), ordered(), sliding, sliding).needed(0) == (range(0), range(0))


def test_of_states_the_last_one_is_needed_where_both_have_a_boundary() -> None:
    same = plan(STATE, STATE, spec(group="mamba"), spec(group="mamba"))
    assert same.needed(64) == (range(3, 4), range(3, 4))
    other = plan(STATE, STATE, spec(16, "mamba"), spec(64, "mamba"))
    assert other.needed(128) == (range(7, 8), range(1, 2))
    with pytest.raises(CannotMap, match="no boundary"):
        other.needed(80)


def test_equal_layouts_have_equal_digests_and_are_read_back() -> None:
    one, two = part(ordered(HND)), part(ordered(HND))
    assert one.digest == two.digest != part(ordered(NHD)).digest
    whole = manifest(spec(), one, part(SECRET, heads=(4, 6)), part(NARROW, heads=(6, 8)))
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
        (lambda: part(ordered(HND + "X")), "cannot be laid out"),
        (lambda: part(ordered("LTKHE"), heads=(0, 1 << 62)), "too many bytes"),
        (lambda: Part((0, 4), (0, 4), 0, 4096 + 1, ordered()), "has 8192 bytes"),
        (lambda: manifest(spec(32), part(ordered(tokens=16))), "blocks of 16 tokens"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(BadDocument, match=why):
        make()


def test_memory_that_does_not_fit_the_plan_is_never_touched() -> None:
    made = plan(ordered(), ordered(tokens=64), spec(16), spec(64))
    source, target = bytearray(8 * 8192), bytearray(2 * 4 * 8192)
    stored = Segments.over(source, 8192)
    into = Segments.over(target, 4 * 8192, writable=True)
    four = list(range(4))
    for error, sources, memory, indices in (
        (ValueError, {}, into, [0]),
        (ValueError, {0: (stored, four[:3])}, into, [0]),
        (ValueError, {0: (stored, four)}, into, [0, 1]),
        (ValueError, {0: (Segments.over(source, 4096), four)}, into, [0]),
        (ValueError, {0: (stored, four)}, Segments.over(target, 4 * 8192), [0]),
        (ValueError, {0: (stored, four)}, Segments.over(target, 8192, writable=True), [0]),
        (IndexError, {0: (stored, four)}, into, [2]),
        (IndexError, {0: (stored, [0, 1, 2, 8])}, into, [0]),
    ):
        with pytest.raises(error):
            made.copy(range(1), sources, memory, indices)
    assert not any(target)
    source[:] = b"\x01" * len(source)
    made.copy(range(1), {0: (stored, four)}, into, [1])
    assert target == bytes(4 * 8192) + b"\x01" * (4 * 8192)


def test_a_read_only_source_that_is_not_read_may_be_left_out() -> None:
    source, target = by_rank(ordered(), 4, spec()), by_rank(ordered(), 2, spec())
    made = CopyPlan(source, target, 1)
    assert made.reads == (2, 3)
    stored = Segments.over(bytes(range(256)) * 8, 2048)
    into = bytearray(4096)
    memory = Segments.over(into, 4096, writable=True)
    made.copy(range(1), {2: (stored, [0]), 3: (stored, [0])}, memory, [0])
    assert sum(into) == 2 * sum(bytes(range(256)) * 8)
