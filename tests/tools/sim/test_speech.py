"""Tokens, KV bytes and text of a simulated engine: functions, and of what."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.tools.sim.kv_bytes import KVContext, kv_of_block
from kvrouter.tools.sim.tokenizer import VOCABULARY, SimTokenizer

SPEC = b"s" * 32
TOKENIZER = SimTokenizer()


@given(st.text())
def test_text_survives_its_tokens(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert TOKENIZER.decode(tokens) == text


@given(st.text(min_size=1), st.text())
def test_a_longer_text_keeps_all_but_the_last_token(text: str, more: str) -> None:
    short, long = TOKENIZER.encode(text), TOKENIZER.encode(text + more)
    assert long[: len(short) - 1] == short[:-1]


def test_english_takes_about_two_characters_per_token() -> None:
    text = "A prompt whose prefix any engine ever computed is never computed again. " * 10
    assert len(text) / len(TOKENIZER.encode(text)) == 2.0


def test_what_was_said_before_keeps_its_tokens_in_a_conversation() -> None:
    first = [{"role": "user", "content": "How long is a block?"}]
    later = [*first, {"role": "assistant", "content": "Sixty-four."}]
    rendered = TOKENIZER.render_chat(first)
    opened = TOKENIZER.encode("assistant\n")
    assert TOKENIZER.render_chat(later)[: len(rendered)] == rendered
    assert rendered[-len(opened) :] == opened


def test_a_conversation_may_be_continued_inside_its_last_message() -> None:
    messages = [{"role": "assistant", "content": "Sixty-"}]
    rendered = TOKENIZER.render_chat(messages, continue_final_message=True)
    assert TOKENIZER.decode(rendered).endswith("Sixty-")


@given(st.binary(min_size=32, max_size=32), st.integers(1, 70_000))
def test_kv_is_a_function_of_the_name_and_as_long_as_asked(name: bytes, size: int) -> None:
    kv = kv_of_block(SPEC, name, size)
    assert len(kv) == size
    assert kv == kv_of_block(SPEC, name, size)


def test_kv_differs_between_names_specs_and_places_in_a_block() -> None:
    name = b"n" * 32
    kv = kv_of_block(SPEC, name, 65536)
    assert kv != kv_of_block(SPEC, b"m" * 32, 65536)
    assert kv != kv_of_block(b"t" * 32, name, 65536)
    assert len({kv[at : at + 4096] for at in range(0, 65536, 4096)}) == 16


def context(*blocks: bytes) -> KVContext:
    seen = KVContext(SPEC)
    for block in blocks:
        seen.add_block(block)
    return seen


def test_the_next_token_depends_on_every_byte_held_and_on_the_tail() -> None:
    kv = kv_of_block(SPEC, b"n" * 32, 65536)
    wrong = bytearray(kv)
    wrong[40_000] ^= 1
    right = context(kv, kv).next_number([1, 2])
    assert right == context(kv, kv).next_number([1, 2])
    assert right != context(kv, bytes(wrong)).next_number([1, 2])
    assert right != context(bytes(wrong), kv).next_number([1, 2])
    assert right != context(kv, kv).next_number([1, 3])
    assert right != context(kv).next_number([1, 2])


@given(st.integers(0, 2**64 - 1))
def test_whatever_is_spoken_is_plain_text(number: int) -> None:
    assert TOKENIZER.decode([TOKENIZER.syllable(number)]).isprintable()
