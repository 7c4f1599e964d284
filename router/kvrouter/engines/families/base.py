"""The seam of engine families: how the two legs of a request are spelt for one kind of engine.

A family never does I/O and never re-serialises a body: it splices the client's own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final

from kvrouter.engines.families.splice import pick, splice

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.table import ParameterTable
    from kvrouter.openai.request import Request


class LegOrder(StrEnum):
    """In which order the legs of a request go, and how KV gets from the one to the other."""

    STORE = "store"  # prefill, its KV lands in the store, decode: KV may be lost, never wrong
    HANDED = "handed over"  # prefill's answer tells decode where to fetch: once, until a lease ends
    CONCURRENT = "concurrent"  # both at once: the engines meet at an address that both are told
    SINGLE = "single"  # decode alone


FETCHED_ONCE: Final = frozenset({LegOrder.HANDED, LegOrder.CONCURRENT})
"""Where one prefill leg serves one decode leg of one sample."""


class BadAnswer(Exception):
    """An engine's answer is not what its family's protocol says; `Failure.ANSWER`."""


@dataclass(slots=True)
class Handoff:
    """What the answer of a prefill leg (or of a probe) tells. Nobody changes it.

    Attributes:
        prompt_token_ids: the raw JSON array of the prompt's token ids, as the engine wrote it;
            None where it was not asked for or the engine does not tell.
        ids: the same as native uint32.
        transfer_params: the raw JSON object `kv_transfer_params` that the decode leg must carry
            verbatim (engines' own connectors); None for store-type engines.
        manifest: hex digest of the engine's manifest, None without the store's connector.
        blocks: leading blocks of the prompt that are or will be in the store.
        block_tokens: tokens per block, 0 where not told.
        root: root of the engine's block hashes, None where not told.
        refusal: why the engine's connector shares no KV; None where it does.
        waits: whether its connector waits for KV that it is told is coming.
        prompt_tokens: of usage; None where absent.
        cached_tokens: of usage, 0 where the engine says null; None where usage is absent.
        missing: the engine was to tell where to fetch the KV from, and does not.
        fields: header lines that the decode leg must carry instead of the request's; None: none.
    """

    prompt_token_ids: bytes | None = None
    ids: bytes | None = None
    transfer_params: bytes | None = None
    manifest: str | None = None
    blocks: int = 0
    block_tokens: int = 0
    root: bytes | None = None
    refusal: str | None = None
    waits: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    missing: bool = False
    fields: bytes | None = None


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and as what the engines of one attempt at two concurrent legs find each other.

    Made anew for every attempt: a second use would mix up two requests, or crash schedulers.

    Attributes:
        prefill: raw JSON of the members that the prefill leg's body gets, by name.
        decode: those of the decode leg's body.
    """

    prefill: dict[str, bytes]
    decode: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class PendingKv:
    """KV that is on its way into the store while the decode leg is sent already.

    Attributes:
        blocks: leading blocks of the prompt that will be there.
        wait_s: when the engine gives up waiting for them and computes.
    """

    blocks: int
    wait_s: float


class Family:
    """Dialect of one kind of engine. It keeps no state of requests.

    What stands here, and what a family does not say otherwise, is the plainest dialect: no transfer
    but at meetings, and nothing told but the client's bytes.
    """

    name: ClassVar[str]
    """As in `--kv-connector`."""
    parameters: ClassVar[ParameterTable]
    """What each leg does with each parameter; rewriting follows it."""
    order: ClassVar[LegOrder]
    health_path: ClassVar[str] = "/health"
    """What a GET answers 200 while the engine is well."""
    lease_s: ClassVar[float] = 0.0
    """How long a prefill engine keeps KV for a decode leg that does not come; 0: not at all."""
    unique_request_ids: ClassVar[bool] = False
    """Whether engines match the legs of a hand-over by `x-request-id`: then no other has theirs."""
    schedules_by_priority: ClassVar[bool] = False
    """Whether engines may be told to begin with the lowest `priority`."""
    can_isolate: ClassVar[bool] = False
    """Whether engines can be kept from using KV that others computed: see `isolated_body`."""
    varies_seeds: ClassVar[bool] = True
    """Whether an engine that draws several samples of one prompt gives sample i the seed + i."""

    def unsplittable(self, request: Request) -> str | None:
        """Why `request` must not be split in two legs (e.g. "echo"), or None if it may."""
        return None

    def hashable(self, request: Request) -> bool:
        """Whether its block hashes follow from its token ids, cache salt and adapter alone."""
        return False

    def needs_legs_per_sample(self, request: Request) -> bool:
        """Whether each of the `request.n` samples needs legs of its own.

        False where an engine draws all of them from one prompt that it holds or loads. True where
        what the prefill leg hands over can be fetched once. Asked where `request.n` is above 1.

        Raises:
            ApiError: 400: the engine would refuse so many, but would not see that there are.
        """
        return self.order in FETCHED_ONCE and self.unsplittable(request) is None

    def reports_tokens(self, request: Request) -> bool:
        """Whether engines that stream an answer to `request` name the tokens of its events.

        Only where another engine can be given those beside the prompt.
        """
        return False

    def tokenize_body(self, request: Request) -> bytes:
        """Body of POST /tokenize for a prompt that is text or messages."""
        return pick(request.body, request.spans, self.parameters.tokenized[request.kind])

    def prefill_body(
        self,
        request: Request,
        *,
        prompt_ids: bytes | None = None,
        want_ids: bool = False,
        rendezvous: Rendezvous | None = None,
        priority: int | None = None,
    ) -> bytes:
        """Body of the prefill leg.

        Args:
            request: as parsed, with its original bytes.
            prompt_ids: JSON array of token ids to send in place of a text prompt.
            want_ids: ask the engine to return the prompt's token ids.
            rendezvous: what the legs share, where they are concurrent.
            priority: of the leg among others, where `schedules_by_priority`; None: the client's.
        """
        table, given = self.parameters, request.spans.keys()
        changes: dict[str, bytes | None] = dict.fromkeys(table.left_out_on_prefill & given)
        changes.update(table.set_on_prefill)
        if rendezvous is not None:
            changes.update(rendezvous.prefill)
        return splice(request.body, request.spans, changes)

    def decode_body(
        self,
        request: Request,
        handoff: Handoff | None,
        *,
        prompt_ids: bytes | None = None,
        pending: PendingKv | None = None,
        rendezvous: Rendezvous | None = None,
        want_ids: bool = False,
    ) -> bytes:
        """Body of the decode leg.

        Args:
            request: as parsed, with its original bytes.
            handoff: from the prefill leg's answer; None where there was no such leg.
            prompt_ids: JSON array of token ids to send in place of a text prompt; by default
                those of the hand-off.
            pending: KV for which the engine is to wait.
            rendezvous: what the legs share, where they are concurrent.
            want_ids: ask the engine to name the tokens of each event, where it can.
        """
        changes: dict[str, bytes | None] = dict.fromkeys(self.parameters.own & request.spans.keys())
        if want_ids and self.reports_tokens(request):
            changes["return_token_ids"] = b"true"
        if rendezvous is not None:
            changes.update(rendezvous.decode)
        return splice(request.body, request.spans, changes) if changes else request.body

    def isolated_body(self, request: Request, *, salt: bytes, prompt_ids: bytes | None) -> bytes:
        """Body of the same request, whole, whose prompt the engine computes all by itself.

        Args:
            request: as parsed.
            salt: raw JSON of a `cache_salt` that no other request has.
            prompt_ids: JSON array of token ids to send in place of a text prompt.

        Only where `can_isolate`.
        """
        raise NotImplementedError

    def new_rendezvous(self, prefill: Engine) -> Rendezvous:
        """A new rendezvous at `prefill` (a server or a rank); only where legs are concurrent.

        Raises:
            LookupError: the engine has not told where it is met.
        """
        raise NotImplementedError

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """Body of a POST /v1/completions by which a decode engine has freed what `params` name.

        The engine refuses it (400) without computing or fetching anything; only where `lease_s`.
        None: nothing but the end of the lease frees it.
        """
        return None

    def read_prefill_answer(self, body: bytes) -> Handoff:
        """Read the prefill leg's answer.

        Raises:
            BadAnswer: it is not a completion's JSON.
        """
        raise BadAnswer("its family has no prefill leg")

    def probe_body(self, model: str, *, priority: int | None = None) -> bytes | None:
        """Body of a POST /v1/completions of one token, whose answer tells who the engine is.

        With `priority` it also tells whether the engine takes one. None: such a request tells
        nothing, or is refused.
        """
        return None
