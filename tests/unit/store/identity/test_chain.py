"""Names of blocks: native chains against an encoder of sha256_cbor written for this test."""

import hashlib
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store import _core

ROOT = _core.root_hash()
DEFAULT_ROOT = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
LORA = ("adapter-ü", "s3://adapters/1")


def cbor(value: object) -> bytes:
    """Encode None, ints >= 0, bytes, str and lists as RFC 8949 4.2 (shortest heads) says."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return head(0, value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    assert isinstance(value, list)
    return head(4, len(value)) + b"".join(cbor(item) for item in value)


def head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << (8 * size):
            return bytes([major << 5 | code]) + number.to_bytes(size, "big")
    raise OverflowError(number)


def digest(value: object) -> bytes:
    return hashlib.sha256(cbor(value)).digest()


def reference(
    tokens: list[int],
    block_tokens: int,
    root: bytes,
    *,
    parent: bytes | None,
    lora: tuple[str, str] | None,
    cache_salt: str | None,
) -> bytes:
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        extra: list[object] = [["lora", *lora]] if lora else []
        if cache_salt and parent is None:
            extra.append(["cache_salt", cache_salt])
        block = tokens[start : start + block_tokens]
        parent = digest([parent or root, block, extra or None])
        hashes.append(parent)
    return b"".join(hashes)


def random_tokens(chance: random.Random, count: int) -> list[int]:
    """Ids of every encoded length, more often than a vocabulary would give them."""
    limits = (24, 256, 65536, 151_936, 2**32)
    return [chance.randrange(chance.choice(limits)) for _ in range(count)]


def test_roots_are_those_of_vllm() -> None:
    assert ROOT.hex() == DEFAULT_ROOT
    assert _core.root_hash("0").hex() == (
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    )
    assert digest("vllm-none-hash") == ROOT


def test_golden_hashes_of_vllm_come_out() -> None:
    plain = _core.chain_hashes([1, 2, 3, 4], 4, root=ROOT)
    salted = _core.chain_hashes([1, 2, 3, 4], 4, root=ROOT, cache_salt="t")
    assert plain.hex() == "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111"
    assert salted.hex() == "a0ac52c648ce50bf95a7eb762effceb7eef511000dfa6489d36dafc24e82c782"


def test_a_thousand_random_chains_equal_the_reference() -> None:
    chance = random.Random(1)
    for _ in range(1000):
        block_tokens = chance.choice((1, 2, 3, 16, 23, 24, 31, 32, 33, 64, 256))
        count = chance.randrange(6 * block_tokens)
        tokens = random_tokens(chance, count)
        root = _core.root_hash(chance.choice((None, "0", "seed-ä")))
        parent = chance.choice((None, chance.randbytes(32)))
        lora = chance.choice((None, LORA))
        salt = chance.choice((None, "", "tenant", "x" * 300))
        found = _core.chain_hashes(
            array("I", tokens), block_tokens, root=root, parent=parent, lora=lora, cache_salt=salt
        )
        assert found == reference(
            tokens, block_tokens, root, parent=parent, lora=lora, cache_salt=salt
        )


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    block_tokens=st.integers(1, 20),
    cut=st.integers(0, 4),
)
def test_a_chain_can_be_continued_from_any_block(
    tokens: list[int], block_tokens: int, cut: int
) -> None:
    whole = _core.chain_hashes(tokens, block_tokens, root=ROOT, cache_salt="s")
    cut = min(cut, len(whole) // 32)
    if cut == 0:
        return
    rest = _core.chain_hashes(
        tokens[cut * block_tokens :],
        block_tokens,
        root=ROOT,
        parent=whole[32 * cut - 32 : 32 * cut],
        cache_salt="s",
    )
    assert whole[: 32 * cut] + rest == whole


def test_a_partial_last_block_has_no_name() -> None:
    assert _core.chain_hashes([1, 2, 3], 4, root=ROOT) == b""
    full = _core.chain_hashes([1, 2, 3, 4], 4, root=ROOT)
    assert _core.chain_hashes([1, 2, 3, 4, 5], 4, root=ROOT) == full


@pytest.mark.parametrize("code", ["I", "i", "q", "l"])
def test_item_types_make_no_difference(code: str) -> None:
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1]
    assert _core.chain_hashes(array(code, tokens), 4, root=ROOT) == _core.chain_hashes(
        tokens, 4, root=ROOT
    )


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [2**70],
        array("q", [2**32]),
        array("q", [-1]),
        array("i", [-1]),
        array("H", [1]),
        array("d", [1.0]),
        b"\0\0\0\0",
    ],
)
def test_what_is_no_token_id_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        _core.chain_hashes(tokens, 1, root=ROOT)


def test_arguments_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="root"):
        _core.chain_hashes([1], 1, root=b"short")
    with pytest.raises(ValueError, match="parent"):
        _core.chain_hashes([1], 1, root=ROOT, parent=b"short")
    with pytest.raises(ValueError, match="block_tokens"):
        _core.chain_hashes([1], 0, root=ROOT)


def test_low64_is_the_id_of_kv_events() -> None:
    hashes = _core.chain_hashes(list(range(12)), 4, root=ROOT)
    ids = [int.from_bytes(hashes[i + 24 : i + 32], "big") for i in range(0, len(hashes), 32)]
    assert list(_core.low64(hashes)) == ids
    with pytest.raises(ValueError, match="multiple of 32"):
        _core.low64(hashes[:-1])
