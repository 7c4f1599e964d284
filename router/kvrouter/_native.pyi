"""Native functions and classes for the router's request path: JSON, HTTP, streams, prefix table."""

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")

def scan_object(
    body: bytes, ids_key: str = "prompt"
) -> tuple[dict[str, tuple[int, int]], bytes | None]:
    """Validate one JSON object in a single pass, without building it.

    Returns:
        spans: start and end in `body` of the value of each top-level member, in order.
        ids: the member `ids_key` as native uint32, if it is a non-empty array of integers
            0..2**32-1; else None.

    Raises:
        ValueError: with the byte offset: not one JSON object (RFC 8259) in UTF-8, a top-level name
            that occurs twice, a lone surrogate, more than 128 levels or 1024 members.
    """

def scan_array(body: bytes, start: int, end: int, max_items: int) -> list[tuple[int, int]]:
    """Validate the JSON array `body[start:end]`; returns start and end in `body` of its items.

    Raises:
        ValueError: with the byte offset: not one JSON array by the rules of `scan_object`, more
            than `max_items` items, or a span beyond the body.
    """

def find_token_ids(body: bytes, key: str) -> tuple[int, int, bytes] | None:
    """Find the first member `key`, at any depth of a JSON text, that is an array of token ids.

    Returns (start, end, ids): where the array is in `body`, and its items as native uint32. An
    empty array does not count. The rest of the text is not validated.
    """

def shared_bytes(one: bytes, other: bytes) -> int:
    """Length of the common prefix."""

def scan_events(
    message: bytes, max_events: int, max_blocks: int, max_values: int
) -> tuple[float, int, bytes]:
    """Find the events of a message (msgpack `[ts, [event...], rank]`) without building any.

    Returns:
        ts: the publisher's clock, in seconds.
        rank: 0 if it names none.
        ends: native uint32: where in `message` the first event begins, and where each of them ends.

    Raises:
        ValueError: it is no such message.
        OverflowError: it has more than so many events, block hashes, values or 16 levels.
    """

def split_array(array: bytes, items: int) -> list[bytes]:
    """A msgpack array as arrays of `items` items, the last with the rest; none of another value."""

def is_blank(text: bytes) -> bool:
    """Whether a msgpack value is nil, or an array of nils and empty arrays."""

def read_ids(array: bytes) -> bytes | None:
    """A msgpack array of integers 0..2**32-1 as native uint32; None: it is another value."""

def json_within(text: bytes, max_values: int, max_containers: int, max_levels: int) -> bool:
    """Whether a JSON text is within bounds: values and names, arrays and objects, their nesting.

    It is not validated.
    """

def msgpack_within(text: bytes, max_values: int) -> bool:
    """Whether `text` is one value of msgpack, of at most so many values and 16 levels."""

class HeaderFields:
    """The header fields of one request: at most `max_lines` lines of `max_bytes` in all."""

    def __init__(self, max_lines: int, max_bytes: int) -> None: ...
    def add(self, name: bytes, value: bytes) -> None:
        """Add one field line; lines beyond the bounds are dropped."""

    def take(self) -> dict[str, str] | None:
        """Return all fields by lower-case name and start again; None: they exceeded the bounds.

        The values of a repeated field are joined with ", ".
        """

class Buckets:
    """Histogram with ascending upper bounds, for one thread."""

    def __init__(self, bounds: Sequence[float]) -> None: ...
    def observe(self, value: float, /) -> None: ...
    @property
    def counts(self) -> list[int]:
        """Values per bucket, not cumulative; the last bucket is above all bounds."""

    @property
    def sum(self) -> float: ...

class StreamFeed:
    """Relays a chunked body: finds the ends of chunks, and counts server-sent events with data.

    It holds an incomplete chunk back, so that the relayed bytes end between chunks; a chunk above
    1 MiB is relayed as several. Chunk extensions are dropped.
    """

    def __init__(self) -> None: ...
    def take(self, data: bytes) -> bytes | None:
        """Return `data` if it can be relayed unchanged; None: relay `frames()`.

        After None, check `ended` and `bad`.
        """

    def frames(self) -> bytes:
        """The chunks to relay for the last `take` that returned None."""

    def watch(self, *marks: bytes) -> None:
        """Set `marked` from now on for pieces that contain one of `marks` or end inside an event.

        All marks begin with the same byte. `take` returns None for a marked piece.
        """

    @property
    def marked(self) -> bool:
        """Whether the last piece must be inspected before it is relayed."""

    def note(self, payload: bytes) -> None:
        """Count a piece of a body that is not chunked."""

    def count_into(self, gaps: Buckets) -> None:
        """Observe the seconds between events in `gaps` from now on."""

    @property
    def ended(self) -> bool:
        """Whether the last chunk was taken."""

    @property
    def bad(self) -> bool:
        """Whether the body breaks the chunked encoding."""

    @property
    def overrun(self) -> bool:
        """Whether more came with the last chunk, behind the body."""

    @property
    def events(self) -> int:
        """Number of events with a `data` field, without the end mark `data: [DONE]`."""

    @property
    def done(self) -> bool:
        """Whether the end mark was taken."""

    @property
    def between_events(self) -> bool:
        """Whether all that was taken ends between two events."""

    @property
    def last_s(self) -> float:
        """Time of the last piece on the monotonic clock, in seconds."""

    @property
    def last_data_s(self) -> float:
        """Time of the last piece with data of an event, in seconds; 0: there was none yet."""

    @property
    def tail(self) -> bytes:
        """The last bytes of the body, about 1 KiB."""

class MissRatioCurve:
    """The share of prompt tokens that a store of any size would find, from a sample of the blocks.

    Samples at most `most` blocks. Prompts of `day_s` ago count half, and blocks that were not used
    for so long are forgotten. For one thread.
    """

    def __init__(self, most: int, day_s: float) -> None: ...
    def see(
        self,
        hashes: bytes,
        model: int,
        block_tokens: int,
        block_bytes: int,
        tokens: float,
        now_s: float,
    ) -> None:
        """A prompt of so many tokens came; `hashes` are of its whole blocks, 32 bytes each.

        `model` is any number below 2**64 that tells blocks of models apart.
        """

    def found(self, store_bytes: float) -> float:
        """The share that a store of that size would find; not a number without a prompt."""

    @property
    def bytes(self) -> int:
        """About how large a store is that has all blocks which are not forgotten."""

class PrefixTable:
    """Which holder (0 to 2047) has which block; a block is the low 64 bits of its hash.

    It keeps at most `max_blocks` blocks, those used last. `ids` are concatenated native uint64,
    `hashes` concatenated 32-byte hashes. For one thread.

    Raises:
        ValueError: from any method: a wrong holder, or a partial item.
    """

    def __init__(self, max_blocks: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def evicted(self) -> int:
        """Number of blocks, or holders of a block, forgotten for lack of room."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the full table."""

    def store(self, holder: int, ids: bytes) -> None: ...
    def store_hashes(self, holder: int, hashes: bytes) -> None: ...
    def remove(self, holder: int, ids: bytes) -> None: ...
    def match(self, hashes: bytes, names: list[_T]) -> dict[_T, int]:
        """Leading blocks of the chain that each holder has, without holders that have none.

        `names` are those of the holders, by number.
        """

    def held(self, holder: int, end: int, max_slots: int) -> tuple[int, bytes]:
        """Scan up to `max_slots` slots below `end` for blocks of `holder`.

        Returns (first scanned slot, ids); pass the slot as the next `end`, until it is 0.
        """

    def retire(self, holder: int) -> None:
        """Forget all blocks of `holder`, whose number must not store again before a full sweep."""

    def sweep(self, max_slots: int) -> bool:
        """Clean up to `max_slots` slots of retired holders.

        True: the numbers that were retired when this sweep began are free.
        """

class SeenBlocks:
    """Which blocks were asked for so far: a sketch of their hashes in at most `max_bytes`.

    It never forgets one of the last `horizon_blocks` different ones; at most one in 200 that are
    new counts as seen. For one thread.
    """

    def __init__(self, max_bytes: int) -> None: ...
    def __len__(self) -> int:
        """Blocks that it knows, about."""

    @property
    def memory_bytes(self) -> int: ...
    @property
    def horizon_blocks(self) -> int: ...
    def see(self, hashes: bytes, seed: int) -> int:
        """Leading blocks of a chain of 32-byte hashes that were seen; from now on all are.

        `seed` is 64 bits wide: chains with another one are others. ValueError for a partial hash.
        """
