"""The simulator's tokenizer: reversible, without a vocabulary file. No model uses it.

Token ids: three special ones, the 256 bytes, then every pair of printable ASCII characters. A text
has about half as many tokens as characters, and a prefix of a text has a prefix of its ids.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

_TEXTS = ("text", "name", "arguments", "input", "output", "content")  # of calls and results, too
IM_START = 1
IM_END = 2
_FIRST_BYTE = 3
_PIECES = re.compile(rb"[ -~]{2}|.", re.DOTALL)
_SPECIALS = (b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>")
_PRINTABLE = bytes(range(0x20, 0x7F))
_VOWELS = b"aeiou"
_CONSONANTS = b"bcdfghjklmnprstvwz"

_BYTES_OF: tuple[bytes, ...] = (
    *_SPECIALS,
    *(bytes([value]) for value in range(256)),
    *(bytes([first, second]) for first in _PRINTABLE for second in _PRINTABLE),
)
_ID_OF: Mapping[bytes, int] = {
    piece: token for token, piece in enumerate(_BYTES_OF) if token >= _FIRST_BYTE
}
VOCABULARY = len(_BYTES_OF)


class SimTokenizer:
    """Text to token ids and back."""

    def __init__(self) -> None:
        pairs = [bytes([c, v]) for c in _CONSONANTS for v in _VOWELS]
        pairs += [bytes([v, c]) for c in _CONSONANTS for v in _VOWELS]
        pairs += [bytes([letter, 0x20]) for letter in _VOWELS + b"nrst"] * 5
        self._syllables = tuple(_ID_OF[pair] for pair in pairs)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text (lone surrogates become question marks)."""
        pieces = _PIECES.findall(text.encode(errors="replace"))
        return list(map(_ID_OF.__getitem__, pieces))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; ids outside the vocabulary become U+FFFD."""
        pieces = (_BYTES_OF[token] if token < VOCABULARY else b"\xef\xbf\xbd" for token in tokens)
        return b"".join(pieces).decode(errors="replace")

    def syllable(self, number: int) -> int:
        """A token of a readable syllable, chosen by any number."""
        return self._syllables[number % len(self._syllables)]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: object = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The prompt of a conversation in ChatML; earlier messages keep their token ids."""
        tokens = [IM_START, *self.encode(json.dumps(tools)), IM_END] if tools else []
        for index, message in enumerate(messages):
            head = f"{message.get('role', 'user')}\n"
            tokens.append(IM_START)
            tokens += self.encode(head)
            tokens += self.encode(_text_of(message.get("content")))
            if calls := message.get("tool_calls"):
                tokens += self.encode(json.dumps(calls))
            if not (continue_final_message and index == len(messages) - 1):
                tokens.append(IM_END)
        if add_generation_prompt and not continue_final_message:
            tokens.append(IM_START)
            tokens += self.encode("assistant\n")
        return tokens


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "".join(str(part[name]) for part in parts for name in _TEXTS if name in part)
    return ""
