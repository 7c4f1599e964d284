"""Native scanning for the router's hot path."""

from collections.abc import Sequence

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

class HeaderFields:
    """The header fields of one request, as a parser finds them: at most `max_lines` of `max_bytes` in all."""

    def __init__(self, max_lines: int, max_bytes: int) -> None: ...
    def add(self, name: bytes, value: bytes) -> None:
        """One field line. What is beyond the bounds is dropped."""

    def take(self) -> dict[str, str] | None:
        """All of them, by lower-case name; the values of a repeated field are joined with ", ". None is left.

        None: they were beyond the bounds.
        """

class Buckets:
    """Values counted by upper bounds, which ascend; for one thread."""

    def __init__(self, bounds: Sequence[float]) -> None: ...
    def observe(self, value: float, /) -> None: ...
    @property
    def counts(self) -> list[int]:
        """Per bound, and last those above all bounds; not cumulative."""

    @property
    def sum(self) -> float: ...

class StreamFeed:
    """A chunked body on its way through: finds where its frames end, counts its server-sent events.

    A frame that has not come whole is held back, so that what is passed on ends between frames; one of more than
    1 MiB goes on in several, as it comes. Extensions of chunks are left out.
    """

    def __init__(self) -> None: ...
    def take(self, data: bytes) -> bytes | None:
        """`data` itself if it may be passed on as it is; None: pass on `frames()`, look at `ended` and `bad`."""

    def frames(self) -> bytes: ...
    def watch(self, *marks: bytes) -> None:
        """From now on pieces are `marked` that hold one of these texts, or that cut an event in two.

        All begin with the same byte. `take` gives None for a marked piece.
        """

    @property
    def marked(self) -> bool:
        """Whether the latest piece is to be looked at before it is passed on."""

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
