"""Which promises a node can keep: pure rules over its cards and the allocations it has already made.

Per device: the sum of promised device time is at most the card times the compute over-commit, the sum of promised memory at most
its memory times the memory over-commit, no single promise exceeds the card, and a whole-card allocation shares with nobody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from poolmeter.enforcer.inventory import Device
from poolmeter.enforcer.request import AllocationRequest
from poolmeter.errors import BadInput, Refused
from poolmeter.model.allocation import Allocation, AllocationState, Demand, Mode, SlicePromise
from poolmeter.model.units import FULL_SHARE_PPM, format_size

_MEMORY_STEP = 1 << 20  # derived memory promises are whole MiB
_NAMED_IN_A_REFUSAL = 8


@dataclass(frozen=True)
class OverCommit:
    """How far the promises of a card may exceed it; 1: not at all."""

    compute: Decimal = Decimal(1)
    memory: Decimal = Decimal(1)


@dataclass(frozen=True)
class Card:
    """One device and what is promised of it."""

    device: Device
    promised_ppm: int = 0
    promised_bytes: int = 0
    holders: int = 0
    whole: bool = False

    def free_ppm(self, over: OverCommit) -> int:
        """Device time that can still be promised."""
        return int(FULL_SHARE_PPM * over.compute) - self.promised_ppm

    def free_bytes(self, over: OverCommit) -> int:
        """Memory that can still be promised."""
        return int(self.device.memory_bytes * over.memory) - self.promised_bytes


def occupancy(devices: Iterable[Device], allocations: Iterable[Allocation]) -> tuple[Card, ...]:
    """The cards with what active allocations hold of them, in the order of `devices`. A device that is gone keeps no card."""
    slices = [
        (item, allocation.mode) for allocation in allocations if allocation.state is AllocationState.ACTIVE for item in allocation.slices
    ]
    return tuple(
        Card(
            device=device,
            promised_ppm=sum(item.promise_ppm for item, _ in slices if item.device_uuid == device.uuid),
            promised_bytes=sum(item.memory_bytes for item, _ in slices if item.device_uuid == device.uuid),
            holders=sum(item.device_uuid == device.uuid for item, _ in slices),
            whole=any(item.device_uuid == device.uuid and mode is Mode.WHOLE for item, mode in slices),
        )
        for device in devices
    )


def promise_on(device: Device, request: AllocationRequest) -> SlicePromise:
    """What `request` asks of this device: a share that is not named follows the one that is, as the same fraction of the card."""
    compute, memory = request.compute_ppm, request.memory_bytes
    if compute is None:
        promise = FULL_SHARE_PPM if memory is None else max(1, min(FULL_SHARE_PPM, memory * FULL_SHARE_PPM // device.memory_bytes))
    else:
        promise = compute
    if memory is None:
        exact = device.memory_bytes * promise // FULL_SHARE_PPM
        memory = exact if promise == FULL_SHARE_PPM or exact < _MEMORY_STEP else exact // _MEMORY_STEP * _MEMORY_STEP
    return SlicePromise(
        device_uuid=device.uuid,
        promise_ppm=promise,
        memory_bytes=memory,
        compute_limit_ppm=None if request.mode is Mode.WHOLE else compute,
        soft=request.soft,
        weight=request.weight,
    )


def objection(card: Card, promise: SlicePromise, mode: Mode, over: OverCommit) -> str | None:
    """Why the card cannot give this promise, as the end of a sentence; None when it can."""
    if card.device.problem is not None:
        return card.device.problem
    if card.whole:
        return "it is held whole by another allocation"
    if mode is Mode.WHOLE and card.holders:
        return f"{card.holders} allocations share it, expected none for a whole card"
    if promise.memory_bytes > card.device.memory_bytes:
        return f"{format_size(promise.memory_bytes)} is asked, the card has {format_size(card.device.memory_bytes)}"
    if promise.promise_ppm > card.free_ppm(over):
        return f"{_percent(promise.promise_ppm)} of its time is asked, {_percent(max(0, card.free_ppm(over)))} is free"
    if promise.memory_bytes > card.free_bytes(over):
        return f"{format_size(promise.memory_bytes)} is asked, {format_size(max(0, card.free_bytes(over)))} is free"
    return None


def place(request: AllocationRequest, cards: Sequence[Card], over: OverCommit) -> tuple[SlicePromise, ...]:
    """A promise for each device of the request. Raises Refused (no room) or BadInput (no such device).

    Named devices are taken in the order named. Otherwise best fit: of the cards with room, those with the least device time left to
    promise, then the least memory left, then the lowest index; so small shares fill a started card before they open another.
    """
    if request.devices:
        chosen = [find(name, cards) for name in request.devices]
        if len({card.device.uuid for card in chosen}) != len(chosen):
            raise BadInput(f"devices {', '.join(request.devices)} name one card twice, expected different cards")
        for card in chosen:
            reason = objection(card, promise_on(card.device, request), request.mode, over)
            if reason is not None:
                raise Refused(f"device {card.device.uuid} (index {card.device.index}) has no room: {reason}")
        return tuple(promise_on(card.device, request) for card in chosen)
    reasons = {card.device.index: objection(card, promise_on(card.device, request), request.mode, over) for card in cards}
    fitting = sorted(
        (card for card in cards if reasons[card.device.index] is None),
        key=lambda card: (card.free_ppm(over), card.free_bytes(over), card.device.index),
    )
    if len(fitting) < request.device_count:
        told = [f"device {index}: {reason}" for index, reason in reasons.items() if reason is not None]
        more = f"; and {len(told) - _NAMED_IN_A_REFUSAL} more" if len(told) > _NAMED_IN_A_REFUSAL else ""
        raise Refused(
            f"{request.device_count} device(s) asked, {len(fitting)} of {len(cards)} have room"
            + (f" ({'; '.join(told[:_NAMED_IN_A_REFUSAL])}{more})" if told else "")
        )
    return tuple(promise_on(card.device, request) for card in fitting[: request.device_count])


def admit_change(allocation: Allocation, slices: Sequence[SlicePromise], others: Sequence[Card], over: OverCommit) -> None:
    """Raises Refused unless the cards, without this allocation's own promises (`others`), can give it `slices`.

    Giving back is always possible, even where the promises already exceed the card (a lowered over-commit, a card that went bad).
    """
    held = {item.device_uuid: item for item in allocation.slices}
    cards = {card.device.uuid: card for card in others}
    for item in slices:
        before = held[item.device_uuid]
        if item.promise_ppm <= before.promise_ppm and item.memory_bytes <= before.memory_bytes:
            continue
        card = cards.get(item.device_uuid)
        if card is None:
            raise Refused(f"device {item.device_uuid} of allocation {allocation.id} is gone, expected a device of the node")
        # What does not grow was admitted before: only what grows is asked of the card.
        asked = SlicePromise(
            device_uuid=item.device_uuid,
            promise_ppm=item.promise_ppm if item.promise_ppm > before.promise_ppm else 0,
            memory_bytes=item.memory_bytes if item.memory_bytes > before.memory_bytes else 0,
        )
        reason = objection(card, asked, allocation.mode, over)
        if reason is not None:
            raise Refused(f"allocation {allocation.id} cannot grow on device {item.device_uuid}: {reason}")


def find(name: str, cards: Sequence[Card]) -> Card:
    """The card with this UUID or index. Raises BadInput."""
    for card in cards:
        if name == card.device.uuid or (name.isdecimal() and int(name) == card.device.index):
            return card
    known = ", ".join(f"{card.device.index} ({card.device.uuid})" for card in cards[:_NAMED_IN_A_REFUSAL])
    raise BadInput(f"device is {name!r:.80}, expected one of this node: {known or 'it has none'}")


def demand_of(request: AllocationRequest, cards: Sequence[Card]) -> Demand:
    """The shape of a request, for the record of its refusal; a share that follows the card is that of the first device meant."""
    meant = [card for card in cards if card.device.uuid in request.devices or str(card.device.index) in request.devices]
    first = next(iter(meant or cards), None)
    promise = None if first is None else promise_on(first.device, request)
    return Demand(
        devices=request.count,
        promise_ppm=promise.promise_ppm if promise else request.compute_ppm or FULL_SHARE_PPM,
        memory_bytes=promise.memory_bytes if promise else request.memory_bytes or 0,
        mode=request.mode.value,
        models=tuple(sorted({card.device.model for card in meant})),
        cpu_milli=request.cpu_milli,
        host_memory_bytes=request.host_memory_bytes,
    )


def _percent(ppm: int) -> str:
    return f"{Decimal(ppm) / 10_000:f} %"
