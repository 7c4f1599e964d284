"""Text for the wire benchmark, and a tokenizer for it.

Words of four letters that spell a number in base 26; the mock engines read them in the same way
(benchmarks/native/mock.c). The tokenizer is a real one of the `tokenizers` package
(`kvrouter[tokenizers]`), but a cheap one: it splits and looks up. Without the package the router
asks the mock engines, whose tokenization a benchmark should not count.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = 20_000  # as in mock.c
LETTERS = 4
_FILE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
}


def word(token: int) -> str:
    """The word of this token."""
    letters = []
    for _ in range(LETTERS):
        token, letter = divmod(token, 26)
        letters.append(chr(ord("a") + letter))
    return "".join(reversed(letters))


class TextTokenizer:
    """A tokenizer.json in a folder, and its tokens of a text.

    Raises:
        ImportError: the `tokenizers` package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra, not a dependency

        words = {word(token): token for token in range(WORDS)}
        model = {"type": "WordLevel", "vocab": words, "unk_token": word(0)}
        self.path = folder / "tokenizer.json"
        self.path.write_text(json.dumps({**_FILE, "model": model}))
        self._tokenizer: Any = Tokenizer.from_file(str(self.path))

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def cost_us(self, texts: Sequence[str]) -> float:
        """CPU microseconds per text, once."""
        started = time.thread_time()
        for text in texts:
            self._tokenizer.encode(text)
        return (time.thread_time() - started) / len(texts) * 1e6
