"""What the demo's real engines have in common: one model, one engine of each role, one judge."""

from collections.abc import Sequence
from types import MappingProxyType

import aiohttp

from kvrouter.tools.demo.alone import Alone
from kvrouter.tools.demo.cluster import Cluster, DemoEngines
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.workload import Reply

BLOCK_TOKENS = 32
DOCUMENT_TOKENS = 3072  # at most, of a document, if a token is two letters or more
TURN_TOKENS = 64  # at most, of a question and what a template adds


class RealEngines(DemoEngines):
    """A prefill and a decode engine; one alone knows the right answers.

    Attributes:
        log_probabilities: whether they give any, so that near ties can be told.
    """

    model = "demo"
    prefill = ("prefill-0",)
    decode = ("decode-0",)
    more = MappingProxyType({"ignore_eos": True, "return_token_ids": True})
    request_s = 300.0
    loaded = "each part's digest verified"
    store_memory = "1GiB"
    log_probabilities = True

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__(settings)
        self._near_ties = 0

    async def checked(
        self, session: aiohttp.ClientSession, cluster: Cluster, replies: Sequence[Reply]
    ) -> list[Reply]:
        """See `DemoEngines`."""
        url = cluster.engines[self.decode[0]].http
        alone = Alone(session, url, self.request_s, self.log_probabilities)
        checked = await alone.checked(replies)
        self._near_ties += alone.near_ties
        return checked

    def assurance(self, wrong_blocks: int) -> str:
        """See `DemoEngines`."""
        ties = f"; {self._near_ties} differ at a near tie" if self._near_ties else ""
        return f"one engine alone gave the same tokens{ties}"

    @property
    def context_tokens(self) -> int:
        """How many tokens the longest conversation has, at most."""
        turn_tokens = self.settings.answer_tokens + TURN_TOKENS
        return DOCUMENT_TOKENS + self.settings.turns * turn_tokens
