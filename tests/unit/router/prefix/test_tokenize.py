from __future__ import annotations

import tracemalloc
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.tokenize import LocalTokenizer, TokenizerUnavailable, TokenSource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ENGINE = Engine("e:1", Role.PREFILL)


def words(text: str) -> list[int]:
    """What the test's tokenizer gives: one id per character class of whitespace-split words."""
    return [min(len(word), 9) for word in text.split()]


@dataclass
class FakeTokenize:
    """An engine's /tokenize; `shift` makes it another tokenizer."""

    shift: int = 0
    error: Exception | None = None
    raw: bytes | None = None
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, engine: Engine, path: str, body: bytes, deadline_s: float) -> bytes:
        assert (engine, path) == (ENGINE, "/tokenize")
        assert deadline_s < 1
        self.bodies.append(body)
        if self.error is not None:
            raise self.error
        if self.raw is not None:
            return self.raw
        ids = [each + self.shift for each in words(orjson.loads(body)["prompt"])]
        return orjson.dumps({"tokens": ids, "count": len(ids)})


class FakeLocal(LocalTokenizer):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str) -> array[int]:
        self.encoded.append(text)
        return array("I", words(text))


def body(text: str) -> bytes:
    return orjson.dumps({"model": "m", "prompt": text})


async def ids(source: TokenSource, text: str) -> Sequence[int] | None:
    found = await source.tokens([ENGINE], "m", body(text), text)
    if found is None:
        return None
    numbers = array("I")
    numbers.frombytes(found.ids)
    assert orjson.loads(found.json) == numbers.tolist()
    assert len(found) == len(numbers)
    return numbers.tolist()


async def test_without_a_local_tokenizer_the_engine_is_asked_and_remembered() -> None:
    post = FakeTokenize()
    source = TokenSource(post)
    assert await ids(source, "a bb ccc") == [1, 2, 3]
    assert await ids(source, "a bb ccc") == [1, 2, 3]
    assert post.bodies == [body("a bb ccc")]
    assert source.counts == {"engine": 1, "cache_hits": 1}


async def test_a_local_tokenizer_is_used_once_an_engine_agreed_with_it() -> None:
    post, local = FakeTokenize(), FakeLocal()
    source = TokenSource(post, local)
    assert await ids(source, "a bb") == [1, 2]
    assert await ids(source, "x " * 5000) == [1] * 5000
    assert len(post.bodies) == 1
    assert source.counts["local"] == 2
    source.close()
    source.close()


async def test_a_local_tokenizer_that_differs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    post, local = FakeTokenize(shift=1), FakeLocal()
    source = TokenSource(post, local)
    assert await ids(source, "a bb") == [2, 3]
    assert await ids(source, "a") == [2]
    assert caplog.text.count("other token ids") == 1


async def test_a_trial_that_failed_is_tried_again() -> None:
    post, local = FakeTokenize(error=OSError("down")), FakeLocal()
    source = TokenSource(post, local)
    assert await ids(source, "a bb") is None
    post.error = None
    assert await ids(source, "a bb") == [1, 2]
    assert source.counts["local"] == 1


@pytest.mark.parametrize("error", [OSError("x"), TimeoutError(), ValueError("404")])
async def test_an_engine_that_cannot_tokenise_means_no_hashes_not_an_error(
    error: Exception,
) -> None:
    source = TokenSource(FakeTokenize(error=error))
    assert await ids(source, "a") is None
    assert source.counts["failed"] == 1


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"tokens":"x"}', b'{"tokens":[-1]}', b'{"tokens":[4294967296]}']
)
async def test_an_answer_that_is_no_token_ids_is_none(raw: bytes) -> None:
    assert await ids(TokenSource(FakeTokenize(raw=raw)), "a") is None


@pytest.mark.parametrize("local", [None, FakeLocal()], ids=["engine", "local"])
async def test_the_cache_is_bounded_by_its_memory(local: FakeLocal | None) -> None:
    bound = 1 << 20
    post = FakeTokenize()
    source = TokenSource(post, local, bound)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(4000):  # the shortest prompts, which are the most for their bytes
            await ids(source, f"{number}")
            post.bodies.clear()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * bound < taken < 1.1 * bound
    kept, kept_bytes, most_bytes = source.use
    assert 0.9 * bound < kept_bytes <= most_bytes == bound
    await ids(source, "3999")
    assert source.counts["cache_hits"] == 1
    await ids(source, "w " * (bound // 64))  # too long to push out all others
    assert source.use.entries == kept


def test_a_tokenizer_file_or_its_directory_is_loaded(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 5, "b": 6, "?": 0}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert LocalTokenizer(str(path)).encode("a b zz").tolist() == [5, 6, 0]


def test_a_missing_tokenizer_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnavailable, match=r"give a tokenizer\.json"):
        LocalTokenizer(str(tmp_path))
