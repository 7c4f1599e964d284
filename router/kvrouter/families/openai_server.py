"""Any server of OpenAI's API, as an engine that computes its prompts itself.

It may share KV with others all the same, through a store of which the router is told nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvrouter.families.base import FETCHED_ONCE, BadAnswer, Coming, Handoff, Meeting, Order
from kvrouter.families.parameters import VLLM
from kvrouter.families.splice import pick, splice

if TYPE_CHECKING:
    from kvrouter.engine import Engine
    from kvrouter.families.table import Table
    from kvrouter.openai import Request


class OpenAiServer:
    """Servers of which nothing is known but OpenAI's API."""

    name: ClassVar[str] = "openai"
    parameters: ClassVar[Table] = VLLM
    order: ClassVar[Order] = Order.SINGLE
    health_path: ClassVar[str] = "/v1/models"
    lease_s: ClassVar[float] = 0.0
    own_ids: ClassVar[bool] = False
    seeds_differ: ClassVar[bool] = True

    def single_leg(self, request: Request) -> str | None:
        """Nothing is split, so nothing may not be."""
        return None

    def samples_alone(self, request: Request) -> bool:
        """Only where two legs meet for one sample."""
        return self.order in FETCHED_ONCE and self.single_leg(request) is None

    def names_tokens(self, request: Request) -> bool:
        """OpenAI's API has no token ids: a server may refuse to be asked for them."""
        return False

    def hashable(self, request: Request) -> bool:
        """Its hashes, if it has any, are unknown."""
        return False

    def tokenize_body(self, request: Request) -> bytes:
        """It is not asked, for nothing follows from its tokens; as vLLM would be."""
        return pick(request.body, request.spans, self.parameters.tokenized[request.kind])

    def prefill_body(
        self,
        request: Request,
        *,
        prompt_ids: bytes | None = None,
        want_ids: bool = False,
        meeting: Meeting | None = None,
    ) -> bytes:
        """There is no such leg."""
        raise NotImplementedError

    def decode_body(
        self,
        request: Request,
        handoff: Handoff | None,
        *,
        prompt_ids: bytes | None = None,
        coming: Coming | None = None,
        meeting: Meeting | None = None,
        want_ids: bool = False,
    ) -> bytes:
        """The client's bytes, without what steers transfers."""
        steered = self.parameters.own & request.spans.keys()
        if not steered:
            return request.body
        return splice(request.body, request.spans, dict.fromkeys(steered))

    def meet(self, prefill: Engine) -> Meeting:
        """There is but one leg."""
        raise NotImplementedError

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """Nothing is held."""
        raise NotImplementedError

    def read_prefill_answer(self, body: bytes) -> Handoff:
        """There is no such leg."""
        raise BadAnswer("a plain OpenAI server has no prefill leg")

    def probe_body(self, model: str) -> bytes | None:
        """A request would cost and tell nothing."""
        return None
