"""Sharing modes: pure rules, one file a mode. `MODES` is the list; a mode that is not in it cannot be measured yet."""

from poolmeter.model.allocation import Mode
from poolmeter.sharing import hook, mig, mps, timeslice, whole
from poolmeter.sharing.rule import Sharing, UsedNumbers

MODES: tuple[Sharing, ...] = (
    hook.HookSharing(),
    whole.WholeSharing(),
    mig.MigSharing(),
    mps.MpsSharing(),
    timeslice.TimesliceSharing(),
)


def sharing_of(mode: Mode) -> Sharing | None:
    """The rules of a mode; None for one without rules yet: its use is unknown, its promise is billed all the same."""
    return next((rules for rules in MODES if rules.mode is mode), None)


__all__ = ["MODES", "Sharing", "UsedNumbers", "sharing_of"]
