"""Native scanning for the router's hot path."""

from collections.abc import Sequence
from typing import Any, TypeVar

_Value = TypeVar("_Value")

def scan_object(body: bytes, ids_key: str = "prompt") -> tuple[dict[str, tuple[int, int]], bytes | None]:
    """Validate one JSON object in a single pass, without building it.

    Returns (spans, ids). `spans`: start and end in `body` of the value of each top-level member, in the order
    of the text. `ids`: the items of the member `ids_key` as native uint32, where it is a non-empty array of
    integers 0..2**32-1; else None.

    ValueError, with the byte offset: not one JSON object (RFC 8259) in UTF-8, a top-level name that occurs
    twice, a lone surrogate, more than 128 levels or 1024 members.
    """

def scan_array(body: bytes, start: int, end: int, max_items: int) -> list[tuple[int, int]]:
    """Validate the JSON array that is `body[start:end]`: start and end in `body` of each of its items.

    ValueError, with the byte offset: not one JSON array by `scan_object`'s rules, more than `max_items` items, or
    a span beyond the body.
    """

def scan_request(
    data: bytes, head_bytes: int, fields: int
) -> tuple[str, str, str, dict[str, str], bytes, bool] | None:
    """One whole plain request of HTTP/1.1: (method, path, query, headers by lower-case name, body, keep-alive).

    None where `data` is anything else, be it only unusual: incomplete, more than one request, chunked, with an
    expectation or upgrade, a method other than GET and POST, a head of more than `head_bytes` or `fields` lines.
    """

def scan_answer(
    data: bytes, head_bytes: int, fields: int
) -> tuple[int, list[tuple[bytes, bytes]], bytes, bool] | None:
    """One whole plain answer of HTTP/1.1 with a content-length: (status, headers, body, keep-alive); else None."""

def scan_chunked(
    data: bytes, head_bytes: int, fields: int
) -> tuple[int, list[tuple[bytes, bytes]], bytes, bool] | None:
    """The whole head of an answer with a chunked body: (status, headers, what has come of the body, keep-alive)."""

def find_bearer(by_digest: dict[bytes, _Value], authorization: str, /) -> _Value | None:
    """What stands under the SHA-256 of the key in an Authorization of `Bearer KEY`; None: nothing, or no such key.

    Blanks and tabs around the key are not its; the scheme may be in any case. More than 2048 bytes are no key.
    """

class QuickGate:
    """Lets in what nearly every request is: a POST with a good key that nothing limits, below `guarded`.

    That is the beginning of a path; nothing that begins so may be open.
    """

    def __init__(self, guarded: str) -> None: ...
    def admit(self, exchange: Any, by_digest: dict[bytes, Any], /) -> bool:
        """Whether it did: takes the key off, sets `caller` and `counted_by`, and counts it; else changes nothing."""

class Buckets:
    """Values counted by upper bounds, which ascend; for one thread."""

    def __init__(self, bounds: Sequence[float]) -> None: ...
    def observe(self, value: float, /) -> None: ...
    @property
    def counts(self) -> list[int]:
        """Per bound, and last those above all bounds; not cumulative."""

    @property
    def sum(self) -> float: ...

class PlanMeter:
    """Times plans, and gathers what `count` puts into dictionaries of counts."""

    def __init__(
        self,
        overhead: Buckets,
        plans: dict[Any, int],
        prompt_tokens: dict[Any, int],
        hit_tokens: dict[Any, int],
    ) -> None: ...
    def note(self, passage: Any, inputs: Any, /) -> None:
        """The plan of a `Passage` was made of such `RouteInputs`: tells it whence its prompt's tokens come."""

    def count(self) -> None:
        """Put into the dictionaries what was noted since the last time."""

class JsonLines:
    """Lines of JSON, an object each, whose members have these names.

    They need no escapes, and are of 28 bytes at most: else ValueError.
    """

    def __init__(self, names: Sequence[str]) -> None: ...
    def add(self, values: tuple[str | float | bool | None, ...]) -> None:
        """Add a line: a value for each name, without those that are None.

        Floats are rounded to a thousandth; those that are not finite are null; what UTF-8 cannot encode is
        replaced. Raises ValueError where they are not as many, TypeError for other values.
        """

    def take(self) -> bytes:
        """All lines; none is left."""

    def __len__(self) -> int:
        """Bytes of the lines that are held."""

class Settler:
    """Counts and times requests that have ended, and adds their lines to `lines`, where there are some.

    `parts`: of the time to the first token. `not_well`: outcomes that are counted as errors. Raises ValueError
    where `lines` have other fields than `kvrouter.log.Line`.
    """

    def __init__(
        self,
        e2e: Buckets,
        ttft: Buckets,
        parts: tuple[Buckets, ...],
        success: dict[Any, int],
        errors: dict[Any, int],
        generation_tokens: dict[Any, int],
        not_well: frozenset[str],
        lines: JsonLines | None,
    ) -> None: ...
    def settle(self, ended: list[tuple[_Value, float]], since_1970_s: float, /) -> list[tuple[_Value, float]]:
        """Each `Passage` ended then, on the monotonic clock, which began so long after 1970. Those that are traced.

        What is no such thing raises AttributeError or TypeError when all the others are settled.
        """

def parts_of(
    started_s: float,
    waited_s: float,
    tokenising_s: float,
    planned_s: float,
    prefilled_s: float,
    landed_s: float,
    until_s: float,
) -> tuple[float, float, float, float, float, float]:
    """Seconds of each part of a request's way until `until_s`; see `kvrouter.account.parts_of`."""

class StreamFeed:
    """A chunked body on its way through: finds where its frames end, counts its server-sent events.

    A frame that has not come whole is held back (8 MiB at most), so that what is passed on ends between frames.
    """

    def __init__(self) -> None: ...
    def take(self, data: bytes) -> bytes | None:
        """`data` itself if it may be passed on as it is; None: pass on `frames()`, look at `ended` and `bad`."""

    def frames(self) -> bytes: ...
    def note(self, payload: bytes) -> None:
        """Count a piece of body that came without frames."""

    def count_into(self, gaps: Buckets) -> None: ...
    @property
    def ended(self) -> bool: ...
    @property
    def bad(self) -> bool: ...
    @property
    def events(self) -> int:
        """Without the end mark `data: [DONE]`."""

    @property
    def first_s(self) -> float:
        """When the first whole frame came, on the monotonic clock; 0.0 before."""

    @property
    def last_s(self) -> float: ...
    @property
    def tail(self) -> bytes:
        """The last bytes of the body, about 1 KiB."""

def find_token_ids(body: bytes, key: str) -> tuple[int, int, bytes] | None:
    """Find the first member `key`, at any depth of a JSON text, whose value is a non-empty array of token ids.

    Returns (start, end, ids): where the array lies in `body`, and its items as native uint32. The text is not
    validated otherwise.
    """

def shared_bytes(one: bytes, other: bytes) -> int:
    """How many leading bytes are equal."""

class PrefixTable:
    """Which holder (numbered 0 to 126) has which block; a block is the low 64 bits of its hash.

    Bounded: beyond `max_blocks` those not used lately are forgotten. Ids are native uint64, hashes 32 bytes each,
    both one after the other. One thread at a time. ValueError: a holder's number, or no whole number of items.
    """

    def __init__(self, max_blocks: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def evicted(self) -> int:
        """Blocks forgotten because `max_blocks` was reached."""

    @property
    def memory_bytes(self) -> int:
        """Memory of all its slots."""

    def store(self, holder: int, ids: bytes) -> None: ...
    def store_hashes(self, holder: int, hashes: bytes) -> None: ...
    def remove(self, holder: int, ids: bytes) -> None: ...
    def match(self, hashes: bytes) -> list[tuple[int, int]]:
        """(holder, leading blocks of the chain that it has), without those that have none."""

    def held(self, holder: int, end: int, max_slots: int) -> tuple[int, bytes]:
        """The ids of its blocks in so many slots below `end`, and where these slots begin: 0, no more."""

    def retire(self, holder: int) -> None:
        """Forget all that it has; its number must not store again before a whole sweep."""

    def sweep(self, max_slots: int) -> bool:
        """Take retired holders out of some slots; True when the numbers retired at its begin are free."""
