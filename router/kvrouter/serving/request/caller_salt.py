"""A `cache_salt` that clients cannot choose: no tenant learns by time what another one has asked.

Engines' caches, the router's index and the store all name blocks of KV by tokens and salt
(vllm/v1/core/kv_cache_utils.py; SGLang joins the salt to its `extra_key`). So a tenant finds what
itself has computed, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.errors import ApiError
from kvrouter.openai.endpoints import PASSED_THROUGH, SALTABLE
from kvrouter.serving.request.versions import with_member

if TYPE_CHECKING:
    from kvrouter.admission.tenants import Tenants
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.request import Request

_REMEMBERED: Final = 4096


@dataclass(eq=False, slots=True, kw_only=True)
class CallerSalts:
    """Gives every request the salt of its tenant, before anything looks at it."""

    tenants: Tenants  # whose names are what is kept apart
    pool: EnginePool  # who would answer
    families: Families  # say which of their endpoints read a salt

    def salted(self, exchange: Exchange, request: Request) -> Request:
        """The request with its tenant's salt, into which the client's own has gone.

        Its body stays as it is if it is no JSON, or if no model runs for it.
        """
        if request.form is not None or not (request.spans and _computes(exchange.path)):
            return request
        salt = derived(self.tenants.of(exchange), request.cache_salt or "")
        salted = with_member(request, "cache_salt", orjson.dumps(salt))
        salted.cache_salt = salt
        return salted

    def require(self, path: str, model: str) -> None:
        """ApiError 501: an engine that may answer would mix the prompts of different tenants."""
        for engine in self.pool.serving(path, model) if _computes(path) else ():
            if not self._reads_salts(engine, path):
                message = f"{path} cannot keep the prompts of callers apart (--salt-from-key)."
                raise ApiError(501, message, kind="NotImplementedError")

    def _reads_salts(self, engine: Engine, path: str) -> bool:
        listed = engine.identity.salted if engine.identity is not None else None
        if listed is not None:
            return path in listed
        return path in SALTABLE and self.families.of(engine).reads_salts


def _computes(path: str) -> bool:
    """Whether a model runs for requests at `path`, as far as is known."""
    endpoint = PASSED_THROUGH.get(path)
    return endpoint is None or endpoint.computes


@lru_cache(_REMEMBERED)
def derived(tenant: str, own: str) -> str:
    """The salt of a tenant's requests that bring the salt `own`: 64 hex digits.

    The same at all routers. No text of `own` makes it another tenant's.
    """
    name = tenant.encode()
    return sha256(b"%d:%b%b" % (len(name), name, own.encode())).hexdigest()
