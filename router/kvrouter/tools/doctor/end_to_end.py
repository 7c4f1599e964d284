"""Checks of what became of a prompt that went from a prefill engine through the store to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.tools.doctor.base import Check, SetUp, error

if TYPE_CHECKING:
    from kvrouter.tools.doctor.base import Found
    from kvrouter.tools.doctor.trials import Trial

_PRODUCER: Final = (
    'give its --kv-transfer-config the kv_role "kv_producer" or "kv_both" (for `kvrouter sim`: '
    "--role prefill), or name it under --decode alone"
)
_CONSUMER: Final = (
    'give its --kv-transfer-config the kv_role "kv_consumer" or "kv_both" (for `kvrouter sim`: '
    "--role decode) and the url of this store, and look in its log for loads that failed"
)


async def _trials(setup: SetUp) -> list[Trial]:
    return await setup.trials.get() if setup.trials is not None else []


async def _roles(setup: SetUp) -> Found:
    """A prefill engine that stores nothing, a decode engine that loads nothing."""
    for trial in await _trials(setup):
        if trial.stopped is not None or trial.no_room:
            continue
        if not trial.promised:
            yield error(
                trial.prefill.name,
                f"it computed a prompt of {trial.blocks} blocks and stored none of them: its "
                "connector is not there to save",
                _PRODUCER,
            )
        elif trial.loaded_tokens is not None and trial.loaded_tokens < trial.needed_tokens:
            yield error(
                trial.decode.name,
                f"of {trial.needed_tokens} tokens that were in the store for it, it loaded "
                f"{trial.loaded_tokens} and computed the rest",
                _CONSUMER,
            )


async def _landings(setup: SetUp) -> Found:
    for trial in await _trials(setup):
        if trial.stopped is not None or trial.landed is None:
            continue
        awaited = min(trial.promised, trial.blocks)
        if trial.no_room:
            yield error(
                setup.settings.store or "",
                f"{trial.no_room} puts found no room while {trial.prefill.name} stored "
                f"{trial.blocks} blocks",
                "give the store node more --memory, or look at who holds leases there",
            )
        elif trial.landed < awaited:
            yield error(
                trial.prefill.name,
                f"it said that it stores {awaited} blocks, and {trial.landed} were there after "
                f"{setup.settings.landing_timeout_s:g} s",
                "look in its log for puts that failed, and at the way between it and the store; "
                "where it is only slow, raise --landing-timeout",
            )


async def _answers(setup: SetUp) -> Found:
    for trial in await _trials(setup):
        if trial.stopped is not None:
            yield error(
                trial.at_fault.name if trial.at_fault is not None else trial.names,
                f"a trial prompt did not come through: {trial.stopped}",
                "do as the sentence says, or look into its log at this moment",
            )
        elif (at := trial.difference) is not None and not _near_tie(setup, trial):
            yield error(
                trial.names,
                f"after KV that was computed by the one and loaded by the other, the answer "
                f"differs from token {at.at} on from that of the first alone ({at.served} and "
                f"{at.alone})",
                "do not serve with this pair until it is understood: compare their dtype, kernels, "
                "attention backends and versions, and run it again",
            )


def _near_tie(setup: SetUp, trial: Trial) -> bool:
    """Whether both tokens were about as likely, so that either may be said."""
    return trial.margin is not None and trial.margin <= setup.settings.canary_near_tie


CHECKS: Final = (
    Check(
        "connector-role",
        "of a trial prompt, prefill engines store the blocks and decode engines load them",
        _roles,
    ),
    Check("landing", "a trial prompt's blocks are in the store in --landing-timeout", _landings),
    Check(
        "end-to-end",
        "a trial prompt gets the same tokens through both legs as from the prefill engine alone",
        _answers,
    ),
)
