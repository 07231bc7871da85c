"""How each sharing mode is carried out; `ACTUATORS` lists them, one per mode."""

from poolmeter.enforcer.actuators.base import Actuator, Refusing
from poolmeter.enforcer.actuators.hook import HookActuator
from poolmeter.enforcer.actuators.whole import WholeActuator
from poolmeter.model.allocation import Mode

ACTUATORS: tuple[Actuator, ...] = (
    HookActuator(),
    WholeActuator(),
    Refusing(Mode.MIG, "carving MIG instances"),
    Refusing(Mode.MPS, "starting an MPS server"),
    Refusing(Mode.TIMESLICE, "setting time slices"),
)


def actuator_of(mode: Mode) -> Actuator:
    """The actuator of a mode."""
    return next(actuator for actuator in ACTUATORS if actuator.mode is mode)
