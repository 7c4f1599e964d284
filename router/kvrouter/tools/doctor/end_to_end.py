"""Checks of trial prompts, which went through a prefill engine, the store and a decode engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.tools.doctor.base import Found, Setup, error

if TYPE_CHECKING:
    from kvrouter.tools.doctor.trials import Trial

_PRODUCER: Final = (
    'give its --kv-transfer-config the kv_role "kv_producer" or "kv_both" (for `kvrouter sim`: '
    "--role prefill), or name it under --decode alone"
)
_CONSUMER: Final = (
    'give its --kv-transfer-config the kv_role "kv_consumer" or "kv_both" (for `kvrouter sim`: '
    "--role decode) and the url of this store, and look in its log for loads that failed"
)


async def connector_role(setup: Setup) -> Found:
    """Of a trial prompt, prefill engines store the blocks and decode engines load them."""
    for trial in await setup.all_trials():
        if trial.stopped is not None or trial.no_room:
            continue
        if not trial.promised:
            yield error(
                trial.prefill.name,
                f"it computed a prompt of {trial.blocks} blocks and stored none of them: its "
                "connector does not save",
                _PRODUCER,
            )
        elif trial.loaded_tokens is not None and trial.loaded_tokens < trial.needed_tokens:
            yield error(
                trial.decode.name,
                f"of {trial.needed_tokens} tokens that were in the store for it, it loaded "
                f"{trial.loaded_tokens} and computed the rest",
                _CONSUMER,
            )


async def landing(setup: Setup) -> Found:
    """A trial prompt's blocks are in the store within --landing-timeout."""
    for trial in await setup.all_trials():
        if trial.stopped is not None or trial.landed is None:
            continue
        expected = min(trial.promised, trial.blocks)
        if trial.no_room:
            yield error(
                trial.store,
                f"{trial.no_room} puts found no room while {trial.prefill.name} stored "
                f"{trial.blocks} blocks",
                "give the store node more --memory, or look at the leases that clients hold there",
            )
        elif trial.landed < expected:
            yield error(
                trial.prefill.name,
                f"it said that it stores {expected} blocks, and {trial.landed} were there after "
                f"{setup.settings.landing_timeout_s:g} s",
                "look in its log for puts that failed, and at the network between it and the "
                "store; if that is only slow, raise --landing-timeout",
            )


async def end_to_end(setup: Setup) -> Found:
    """A trial prompt gets the same tokens through both legs as from the prefill engine alone."""
    for trial in await setup.all_trials():
        if trial.stopped is not None:
            yield error(
                trial.at_fault.name if trial.at_fault is not None else trial.names,
                f"a trial prompt failed: {trial.stopped}",
                "do as the sentence says, or look into its log at this moment",
            )
        elif (at := trial.difference) is not None and not _near_tie(setup, trial):
            yield error(
                trial.names,
                f"after KV that the one computed and the other loaded, the answer differs from "
                f"token {at.at} on from that of the first alone ({at.served} and {at.alone})",
                "do not serve with this pair until the cause is known: compare their dtype, "
                "kernels, attention backends and versions, and run it again",
            )


def _near_tie(setup: Setup, trial: Trial) -> bool:
    """Whether both tokens were about equally likely, so that both are right."""
    return trial.margin is not None and trial.margin <= setup.settings.canary_near_tie
