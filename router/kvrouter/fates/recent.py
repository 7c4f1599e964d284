"""What became of the prompt tokens of recent requests, told as a ladder, or as one's story."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from kvrouter.fates.fate import REUSED, Fate
from kvrouter.fates.split import Evidence  # noqa: TC001 (the decoder reads it)
from kvrouter.prefix.learnt import session_of
from kvrouter.telemetry.request_log import RequestLine, encodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvrouter.fates.split import Fates
    from kvrouter.openai.request import Request

KEPT: Final = 4096
WINDOW_S: Final = 300.0
LEAST_SHARE: Final = 0.02  # of all prompt tokens; a headline names no smaller loss


class Account(Struct, array_like=True, gc=False):
    """What is kept of one request, with what is known of each of its prompts."""

    line: RequestLine
    session: str
    known: list[Evidence]


_ENCODE: Final = Encoder().encode
_DECODE: Final = Decoder(Account).decode


@dataclass(eq=False, slots=True)
class Recent:
    """The last `KEPT` requests that have fates. `session_header` is as in `session_of`."""

    session_header: str | None
    _kept: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    """Encoded: as objects they would scatter what is new over memory that no cache holds."""

    def add(
        self,
        line: RequestLine,
        request: Request,
        headers: Mapping[str, str],
        known: list[Evidence],
    ) -> None:
        """A request has ended; `line` has its fates."""
        session = session_of(request, headers, self.session_header, named=True) or b""
        account = Account(line, session.decode("utf-8", "replace"), known)
        try:
            self._kept.append(_ENCODE(account))
        except UnicodeEncodeError:  # a lone surrogate
            account.line = encodable(line)
            self._kept.append(_ENCODE(account))

    def ladder(self, now_s: float, model: str = "", key: str = "", session: str = "") -> str:
        """Those of the last WINDOW_S seconds, "" is any; `now_s` is since 1970."""
        found, requests, span_s = Counter[str](), 0, 0.0
        for account in map(_DECODE, reversed(self._kept)):
            line = account.line
            ago_s = now_s - (line.time or now_s)
            if ago_s > WINDOW_S:
                break
            right = not model or model in (line.model, line.version)
            if right and key in ("", line.key) and session in ("", account.session):
                found.update(line.fates or {})
                span_s, requests = max(span_s, ago_s), requests + 1
        return "\n".join(_lines(found, f"{requests:,} requests of the last {span_s:.0f} s"))

    def story(self, request_id: str) -> str | None:
        """The last request with that id; None: it is not known any more."""
        for account in map(_DECODE, reversed(self._kept)):
            line = account.line
            if line.request_id == request_id:
                steps = [step for each in account.known for step in _steps(line, each)]
                return "\n".join(_lines(line.fates or {}, *steps))
        return None


def in_order(fates: Mapping[str, int]) -> Fates:
    """What was reused first, then what was computed, each the most first."""
    order = sorted(map(Fate, fates), key=lambda fate: (fate not in REUSED, -fates[fate]))
    return {fate: fates[fate] for fate in order if fates[fate]}


def headline(fates: Mapping[str, int]) -> str:
    """The largest avoidable losses in a sentence, or that there is none."""
    found, total = in_order(fates), sum(fates.values())
    if not total:
        return "No request with a prompt has ended lately."
    shares = {fate: tokens / total for fate, tokens in found.items()}
    lost = [f for f in found if f.remedy and shares[f] >= LEAST_SHARE]
    if lost:
        named = "; then ".join(f"{shares[fate]:.1%} {fate.words}" for fate in lost)
        return f"Largest avoidable loss of prompt tokens: {named}."
    reused, first = sum(shares.get(f, 0) for f in REUSED), shares.get(Fate.FIRST_USE, 0)
    return f"No avoidable loss of {LEAST_SHARE:.0%}: {reused:.1%} reused, {first:.1%} first uses."


def _lines(fates: Mapping[str, int], *told: str) -> Iterator[str]:
    found, total = in_order(fates), sum(fates.values())
    yield headline(fates)
    yield from (f"  -> {fate.words}: {fate.remedy}" for fate in found if fate.remedy)
    yield from ("", *told, f"{total:14,} prompt tokens")
    yield from (f"{n:14,}  {n / total:6.1%}  {fate.words}" for fate, n in found.items())


def _steps(line: RequestLine, known: Evidence) -> Iterator[str]:
    """What happened to a prompt, in order."""
    engine = line.prefill if known.by_prefill else line.decode
    yield f"prompt   {known.prompt:,} tokens; earlier requests had {known.seen:,}"
    yield (
        f"match    {engine} held {known.own:,}, with lower tiers {max(known.own, known.lower):,};"
        f" the store {known.store:,}, another engine {known.elsewhere:,}"
    )
    legs = f"prefill on {line.prefill}, decode" if line.prefill else "decode"
    yield f"plan     {line.plan}: {legs} on {line.decode}"
    if line.landed_blocks is not None or line.nothing_landed is not None:
        why = f" ({line.nothing_landed})" if line.nothing_landed else ""
        yield f"landing  {line.landed_blocks or 0:,} blocks in {line.landing_ms or 0:g} ms{why}"
    if known.loaded is not None:
        yield f"load     {line.decode} had {known.loaded:,} tokens without computing them"
    said = "does not say" if known.cached is None else f"says that it reused {known.cached:,}"
    here = "" if known.held is None else f", {known.held:,} of them from its own cache"
    yield f"report   {engine} {said}{here}"
