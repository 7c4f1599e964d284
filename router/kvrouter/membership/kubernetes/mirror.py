"""What the API server has shown of a collection: a synchronous state machine over its bytes.

A list replaces everything, when its last page is there. The events of a watch change one object
each, and say from where the next watch goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec

from kvrouter.http.bounded_json import bounded
from kvrouter.membership.kubernetes.engines import NOTHING, Named, Odd, one_of_each
from kvrouter.membership.kubernetes.objects import Bookmark, Event, Page, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.membership.kubernetes.engines import Found
    from kvrouter.membership.kubernetes.objects import Metadata


class _Object(Protocol):
    @property
    def metadata(self) -> Metadata: ...


T = TypeVar("T", bound=_Object)

GONE: Final = 410
MAX_LINE_BYTES: Final = 4 << 20  # of one event; no object is larger than etcd's 1.5 MiB
MAX_OBJECT_CONTAINERS: Final = 20_000
"""Lists and mappings of one event: a slice of a thousand endpoints has 5,000."""
MAX_PAGE_CONTAINERS: Final = 150_000  # of a page of a hundred objects


class Expired(Exception):
    """The server no longer knows the version from which to go on: list again."""


class Unreadable(Exception):
    """What came is no answer of such a server, or says that it failed; a sentence."""


@dataclass(eq=False)
class Mirror(Generic[T]):
    """The engines of a collection, as its last list and the events since then name them."""

    kind: type[T]  # the type of its objects
    name_engines: Callable[[T], Named]  # what one names; raises Odd
    most: int  # engines; more are refused
    version: str = field(default="", init=False)  # from which to watch; "": list first
    odd: dict[str, str] = field(default_factory=dict, init=False)
    """What to correct in objects that are left out, by their names."""
    read: int = field(default=0, init=False)  # events since it was made

    def __post_init__(self) -> None:
        kind = self.kind
        self._too_many = f"more than {self.most} members; select fewer"
        self._objects = msgspec.json.Decoder(kind)
        self._pages: msgspec.json.Decoder[Page[T]] = msgspec.json.Decoder(Page[kind])  # type: ignore[valid-type]
        self._named: dict[str, Named] = {}
        self._listed: dict[str, Named] = {}
        self._rest = b""  # of the watch: the beginning of a line

    def engines(self) -> list[Found]:
        """All engines, each once."""
        return one_of_each(self._named.values())

    def begin_list(self) -> None:
        """A list begins. What was known stays until it has ended."""
        self.version = ""
        self._listed = {}

    def page(self, body: bytes) -> str:
        """Take a page of a list; returns the token of the next, "" if it was the last.

        Unreadable: see there; or there are more engines than `most`.
        """
        page: Page[T] = _decoded(self._pages, body, MAX_PAGE_CONTAINERS)
        if len(page.items or ()) > self.most:
            raise Unreadable(self._too_many)
        for each in page.items or ():
            self._see(self._listed, each)
        if max(len(self._listed), len(one_of_each(self._listed.values()))) > self.most:
            raise Unreadable(self._too_many)
        if not page.metadata.more:
            self._named, self._listed = self._listed, {}
            self.odd = {name: odd for name, odd in self.odd.items() if name in self._named}
            self.version = page.metadata.resource_version
        return page.metadata.more

    def begin_watch(self) -> None:
        """A watch from `version` begins."""
        self._rest = b""

    def feed(self, chunk: bytes) -> bool:
        """Take bytes of the watch, cut anywhere; returns whether `engines` or `odd` may differ.

        Expired: see there. Unreadable: see there; or there are more objects than `most`.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise Unreadable(f"an event of more than {MAX_LINE_BYTES} bytes")
        changes = [self._take(line) for line in lines if line.strip()]
        return any(changes)

    def _take(self, line: bytes) -> bool:
        event = _decoded(_EVENTS, line)
        if event.type == "ERROR":
            status = _decoded(_STATUSES, event.object)
            self.version = ""
            if status.code == GONE:
                raise Expired
            raise Unreadable(status.message or f"the watch failed with {status.code}")
        self.read += 1
        if event.type == "BOOKMARK":
            self.version = _decoded(_BOOKMARKS, event.object).metadata.resource_version
            return False
        seen = _decoded(self._objects, event.object)
        self.version = seen.metadata.resource_version
        name = seen.metadata.name
        before = self._named.get(name), self.odd.get(name)
        if event.type == "DELETED":
            self._named.pop(name, None)
            self.odd.pop(name, None)
        else:
            self._see(self._named, seen)
            if len(self._named) > self.most:
                raise Unreadable(self._too_many)
        return (self._named.get(name), self.odd.get(name)) != before

    def _see(self, into: dict[str, Named], seen: T) -> None:
        """Keep what it names. NOTHING stays only where the object is odd."""
        name = seen.metadata.name
        try:
            named = self.name_engines(seen)
        except Odd as odd:
            into[name], self.odd[name] = NOTHING, str(odd)
            return
        self.odd.pop(name, None)
        if named != NOTHING:
            into[name] = named
        else:
            into.pop(name, None)


def read_status(body: bytes) -> str:
    """The message of the body of an answer that is no 200; "" if it has none."""
    try:
        return _STATUSES.decode(body).message
    except (ValueError, RecursionError):
        return ""


_EVENTS: Final = msgspec.json.Decoder(Event)
_BOOKMARKS: Final = msgspec.json.Decoder(Bookmark)
_STATUSES: Final = msgspec.json.Decoder(Status)


def _decoded(
    decoder: msgspec.json.Decoder[Any],
    text: bytes | msgspec.Raw,
    containers: int = MAX_OBJECT_CONTAINERS,
) -> Any:
    try:
        return decoder.decode(bounded(bytes(text), len(text), containers))
    except (ValueError, RecursionError) as error:  # msgspec raises more than its own
        raise Unreadable(f"not what Kubernetes answers: {error}") from None
