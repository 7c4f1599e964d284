"""Records requests that have ended: what a store of any size would find, and lines of a trace.

A line is one of Mooncake's traces with more members. It has no text, and no hash that others could
compute: names are made with a random salt.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter._native import MissRatioCurve
from kvrouter.prefix.learnt import PIECE_TOKENS, session_of
from kvrouter.serving.request.summary import ms, prompt_tokens
from kvrouter.telemetry.request_log import FLUSH_S
from kvrouter_store.identity.chain import HASH_BYTES, hash_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.record_file import RecordFile

NAMED_TOKENS: Final = 512  # tokens for which each name stands, as in Mooncake's traces
MOST_SAMPLED: Final = 16_384  # blocks in the sample of the curve, of less than 2 MB
MOST_TOKENS: Final = 1 << 22  # no prompt counts as more: engines tell the number


@dataclass(eq=False)
class Recorder:
    """Takes requests that have ended."""

    session_key: str | None  # header that names sessions
    kv_bytes: Callable[[str | None], float] | None  # of a token, by manifest; None: no store
    file: RecordFile | None  # takes the lines; its owner closes it. None: there are none

    def __post_init__(self) -> None:
        self.curve = MissRatioCurve(MOST_SAMPLED, day_s=86_400.0)
        self._salt, self._began_s = token_bytes(HASH_BYTES), monotonic()
        self._lines: list[bytes] = []

    def take(self, context: RequestContext, now_s: float) -> None:
        """A request for text ended then, on the monotonic clock."""
        for one in context.shares or (context,):
            plan, chain, block_tokens = one.route.plan, one.prompt.learnt, PIECE_TOKENS
            if plan is None:
                continue  # no engine got it
            tokens = min(max(1, prompt_tokens(one)), MOST_TOKENS)
            if one.prompt.hashes and one.prompt.domain is not None:
                chain, block_tokens = one.prompt.hashes, one.prompt.domain.block_tokens
                per_token = self.kv_bytes(plan.decode.manifest) if self.kv_bytes is not None else 0
                if block_bytes := int(block_tokens * per_token):
                    model = hash(one.model) % (1 << 64)
                    self.curve.see(chain, model, block_tokens, block_bytes, tokens, now_s)
            if self.file is not None:
                names = self._names(chain or b"", block_tokens, tokens, one.model)
                self._lines.append(self._line(one, context.outcome.reason, tokens, names, now_s))
                if len(self._lines) == 1:  # each write wakes a thread
                    asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def store_sizes(self) -> dict[int, float]:
        """What stores would find by their bytes: powers of two, up to one that holds everything."""
        most = self.curve.bytes.bit_length()
        sizes = [1 << power for power in range(max(0, most - 6), most + 1)] if most else []
        return {size: self.curve.found(size) for size in sizes}

    def flush(self) -> None:
        """Have the lines of what was taken written."""
        if self._lines and self.file is not None:
            self.file.write(b"".join(self._lines))
            self._lines.clear()

    def _line(
        self, one: RequestContext, outcome: str, tokens: int, names: list[int], now_s: float
    ) -> bytes:
        timing = one.timing
        session = session_of(one.request, one.exchange.headers, self.session_key, named=True)
        line = {
            "timestamp": int((timing.started_s - self._began_s) * 1000),
            "input_length": tokens,
            "output_length": max(1, one.outcome.generated),
            "hash_ids": names,
            "session": self._salted(session, 8).hex() if session is not None else None,
            "model": one.model,
            "outcome": outcome,
            "ttft_ms": ms(timing.first_s - timing.started_s) if timing.first_s else None,
            "total_ms": ms(now_s - timing.started_s),
        }
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def _names(self, chain: bytes, block_tokens: int, tokens: int, model: str) -> list[int]:
        """Salted names of the pieces of a prompt, equal for equal beginnings.

        The last piece is named by its block hashes so far and the length; without any, randomly.
        """
        whole = min(len(chain) // HASH_BYTES * block_tokens, tokens) // NAMED_TOKENS
        if NAMED_TOKENS % block_tokens:
            ends = [-(-NAMED_TOKENS * n // block_tokens) * HASH_BYTES for n in range(1, whole + 1)]
            ids = b"".join([chain[end - 8 : end] for end in ends])
        else:
            words = NAMED_TOKENS // block_tokens * HASH_BYTES // 8
            ids = memoryview(chain).cast("Q")[words - 1 : whole * words : words].tobytes()
        last = chain[-4:] + tokens.to_bytes(4, "little") if chain else token_bytes(8)
        ids += last * (-(-tokens // NAMED_TOKENS) - whole)
        root = self._salted(model.encode(), HASH_BYTES)
        chained = hash_tokens(memoryview(ids).cast("I"), 2, root=root).data
        return memoryview(chained).cast("I")[:: HASH_BYTES // 4].tolist()

    def _salted(self, name: bytes, size: int) -> bytes:
        return blake2b(name, key=self._salt, digest_size=size).digest()
