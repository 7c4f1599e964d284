"""What earlier prompts had: by their identity, and by what they say alone."""

import json
from array import array
from dataclasses import dataclass
from typing import Any

import pytest

from kvrouter._native import SeenBlocks
from kvrouter.engines.engine import HashDomain
from kvrouter.fates.history import MAX_BYTES, History, Past
from kvrouter.openai.request import Request, parse
from kvrouter.prefix.hash_cache import HashCache
from kvrouter.prefix.stores.base import Origin
from kvrouter_store.identity.chain import HASH_BYTES, root_hash

DOMAIN = HashDomain(16, root_hash(None))


@dataclass
class Prompt:
    domain: HashDomain | None = DOMAIN
    hashes: bytes | None = None
    origin: Origin | None = None
    learnt: bytes | None = None


class Asked:
    """Asks a history for prompts of token ids, or of text."""

    def __init__(self) -> None:
        self.cache = HashCache()
        self.history = History(self.cache)

    def ids(self, count: int, *, salt: str | None = None, **more: Any) -> Past:
        base, alias = more.pop("base", "m"), more.pop("alias", None)
        ids, adapter = array("I", range(count)).tobytes(), more.pop("adapter", None)
        hashes = self.cache.hashes(ids, DOMAIN, adapter, salt)
        prompt = Prompt(hashes=hashes)
        prompt.origin = Origin(ids, DOMAIN.block_tokens, salt, adapter)
        return self.history.add(request("ids"), prompt, base, alias)

    def text(self, text: str) -> Past:
        return self.history.add(request(text), Prompt(), "m", None)


def request(text: str) -> Request:
    return parse(json.dumps({"model": "m", "prompt": text}).encode(), "completion", 1)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_prompt_is_seen_up_to_where_it_differs_from_earlier_ones(asked: Asked) -> None:
    assert asked.ids(100) == Past(0, 0)
    assert asked.ids(170) == Past(96, 96)
    assert asked.ids(170) == Past(160, 160)


def test_models_have_their_own_prompts(asked: Asked) -> None:
    asked.ids(100)
    assert asked.ids(100, base="other") == Past(0, 0)


def test_a_prompt_with_another_salt_is_akin(asked: Asked) -> None:
    asked.ids(100, salt="a")
    assert asked.ids(100, salt="b") == Past(0, 96)
    assert asked.ids(100, salt="a") == Past(96, 96)
    assert asked.ids(100) == Past(96, 96)  # a prompt without a salt is what the others are akin to


def test_a_prompt_for_another_adapter_or_version_is_akin(asked: Asked) -> None:
    asked.ids(100)
    assert asked.ids(100, adapter=("a", "/a")) == Past(0, 96)
    asked.ids(100, alias="chat", base="m-1")
    assert asked.ids(100, alias="chat", base="m-2") == Past(0, 96)


def test_a_text_without_token_ids_is_seen_by_its_pieces(asked: Asked) -> None:
    text = "".join(f"{number:8}" for number in range(400))
    whole = request(text).prompt_tokens
    assert asked.text(text) == Past(0, 0)
    assert asked.text(text) == Past(whole, whole)
    assert 0 < asked.text(text[:1600] + "x" * 1600).seen < whole
    assert asked.text("short") == Past(0, 0)


def test_its_memory_is_bounded_and_its_horizon_is_as_told() -> None:
    seen = SeenBlocks(MAX_BYTES)
    assert seen.memory_bytes <= MAX_BYTES <= 64 << 20
    assert seen.horizon_blocks >= 12_000_000
    assert len(seen) == 0
    with pytest.raises(ValueError, match="whole number"):
        seen.see(bytes(HASH_BYTES + 1), 0)
