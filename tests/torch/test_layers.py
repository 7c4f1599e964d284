"""Where a block's bytes are, for every shape of tensors, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.torch.caches import BLOCK_TOKENS, contiguous, paged

from kvrouter_store.identity.block import CacheSpec, Manifest
from kvrouter_store.identity.chain import root_hash
from kvrouter_store.tensors.layers import LayerBlocks, layered_manifest

pytestmark = pytest.mark.torch
SPEC = CacheSpec("m", "r1", "float32", BLOCK_TOKENS, "sha256_cbor", root_hash(None).hex())
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.uint8])


@given(
    blocks=st.integers(1, 5),
    block_tokens=st.integers(1, 5),
    rest=st.lists(st.integers(1, 4), max_size=3),
    gap=st.integers(0, 3),
    dtype=TYPES,
)
def test_the_bytes_of_a_block_are_its_tokens_in_each_tensor_in_turn(
    blocks: int, block_tokens: int, rest: list[int], gap: int, dtype: torch.dtype
) -> None:
    wide = [torch.randint(0, 99, (blocks, block_tokens + gap, *rest)).to(dtype) for _ in "kv"]
    layer = LayerBlocks.paged(*(each[:, :block_tokens] for each in wide))  # blocks have gaps
    copies = [each[:, :block_tokens].contiguous() for each in wide]
    again = LayerBlocks.contiguous(
        *(each.flatten(0, 1) for each in copies), block_tokens=block_tokens
    )
    assert layer.block_bytes == again.block_bytes == sum(each[0].nbytes for each in copies)
    one, other = (each.in_host_memory.segments for each in (layer, again))
    assert one.digests(range(blocks)) == other.digests(range(blocks))
    assert layer.part(0, "e") == again.part(0, "e")


def test_tokens_after_the_last_whole_block_belong_to_none() -> None:
    blocks = contiguous(4)[0].in_host_memory.segments
    assert blocks.blocks == 4
    with pytest.raises(IndexError):
        blocks.digests([4])


def test_a_manifest_has_one_part_for_each_layer_and_survives_its_document() -> None:
    manifest = layered_manifest(SPEC, contiguous(2), "test")
    assert [part.layers for part in manifest.parts] == [(0, 1), (1, 2), (2, 3)]
    assert {part.kv_heads for part in manifest.parts} == {(0, 2)}
    assert Manifest.from_doc(manifest.doc) == manifest
    assert layered_manifest(SPEC, paged(9), "test") == manifest
    assert layered_manifest(SPEC, paged(9), "other") != manifest


def test_caches_of_other_shapes_or_types_share_nothing() -> None:
    def parts(*shape: int, dtype: torch.dtype = torch.float32) -> Manifest:
        layer = LayerBlocks.paged(torch.zeros(2, BLOCK_TOKENS, *shape, dtype=dtype))
        return layered_manifest(SPEC, [layer], "test")

    assert len({parts(2, 16), parts(4, 8), parts(32), parts(2, 32, dtype=torch.bfloat16)}) == 4


def test_latent_attention_has_one_head() -> None:
    assert LayerBlocks.paged(torch.zeros(2, 4, 576)).part(0, "e").kv_heads == (0, 1)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ((), "needs tensors of equal"),
        ((torch.zeros(2, 4, 8), torch.zeros(3, 4, 8)), "needs tensors of equal"),
        ((torch.zeros(2, 8, 4).transpose(1, 2),), "has gaps"),
        ((torch.zeros(4, 2, 8).transpose(0, 1),), "has gaps"),
    ],
)
def test_tensors_without_dense_blocks_are_refused(
    tensors: tuple[torch.Tensor, ...], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        LayerBlocks(tensors)


def test_a_spec_of_other_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="do not have 8 tokens a block"):
        layered_manifest(SPEC, [LayerBlocks.paged(torch.zeros(2, 4, 8))], "test")


def test_tensors_that_are_not_in_host_memory_have_no_segments() -> None:
    with pytest.raises(ValueError, match="not in host memory"):
        _ = LayerBlocks.paged(torch.zeros(2, 4, 8, device="meta")).in_host_memory
