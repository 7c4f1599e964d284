"""As `prefix`, but a prompt is bound to engines only when a prefill engine is about to be free."""

from __future__ import annotations

from typing import ClassVar

from kvrouter.routing.policies.prefix import Prefix


class Planner(Prefix):
    """Least cost in tokens, for the legs that `PrefillQueue` does not bind: those tried again."""

    name: ClassVar[str] = "planner"
    summary: ClassVar[str] = (
        "as prefix, once a prefill engine is about to be free for the prompt: the shortest first"
    )
