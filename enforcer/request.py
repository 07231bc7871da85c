"""What a client asks of an enforcer, checked: the one place that says which labels and numbers can be honoured.

The records travel as JSON over the socket; the daemon checks them again, because a client may be anybody on the node.
"""

import re
from dataclasses import dataclass, fields

from poolmeter.errors import BadInput
from poolmeter.model.allocation import Environment, Labels, Mode, WorkloadClass
from poolmeter.model.units import FULL_SHARE_PPM

MAX_LABEL = 128
MAX_ALLOCATIONS = 4096  # of a node: each is a folder, a pair of pages, and series in every scrape
MAX_DEVICES = 64  # entries of a grant page
MAX_WEIGHT = 10_000
MAX_BYTES = 1 << 50
ALLOCATION_ID = re.compile(r"^a-[0-9a-z]{1,16}-[0-9a-f]{8,32}$")


@dataclass(frozen=True)
class AllocationRequest:
    """A share of one or more cards.

    `devices` are UUIDs or indices; when it is empty, `device_count` cards are picked. Neither `compute_ppm` nor `memory_bytes`:
    whole cards; one of them: the other's promise is the same fraction of the card.
    """

    labels: Labels
    mode: Mode = Mode.HOOK
    devices: tuple[str, ...] = ()
    device_count: int = 1
    compute_ppm: int | None = None
    memory_bytes: int | None = None
    soft: bool = False
    weight: int = 100
    pinned: bool = False
    cpu_milli: int | None = None
    host_memory_bytes: int | None = None
    on_fault: str = "refuse"
    charge_copies: bool = False
    enforcement: str = "cooperative"
    owned: bool = False  # it ends with the process that asks
    record_refusal: bool = True  # False while another node is asked next: a demand that is met there was not refused

    @property
    def count(self) -> int:
        """How many cards are asked for."""
        return len(self.devices) or self.device_count


@dataclass(frozen=True)
class ResizeRequest:
    """New limits of an allocation; what is None stays. `device` (UUID or index) None: on all its devices."""

    id: str
    compute_ppm: int | None = None
    memory_bytes: int | None = None
    device: str | None = None


def check_label(name: str, value: str | None) -> None:
    """Raises BadInput for an empty label, one that is too long, or one that a terminal or a page could trip over."""
    if value is None:
        return
    if not value or len(value) > MAX_LABEL or not value.isprintable() or value != value.strip():
        raise BadInput(f"{name} is {value!r:.140}, expected 1 to {MAX_LABEL} printable characters without outer spaces")


def check_id(value: str) -> str:
    """`value` when it looks like an allocation's id, so that it can name a folder. Raises BadInput."""
    if not ALLOCATION_ID.fullmatch(value):
        raise BadInput(f"allocation id is {value!r:.80}, expected one such as a-1kq2m3n4p-0123456789ab (poolmeter allocation list)")
    return value


def check_request(request: AllocationRequest) -> AllocationRequest:
    """The request, when every value can be honoured by some node. Raises BadInput naming the first that cannot."""
    for item in fields(Labels):
        check_label(item.name.replace("workload_class", "class"), getattr(request.labels, item.name))
    _one_of("class", request.labels.workload_class, WorkloadClass)
    _one_of("environment", request.labels.environment, Environment)
    if len(set(request.devices)) != len(request.devices) or any(not 0 < len(device) <= 64 for device in request.devices):
        raise BadInput(f"devices are {', '.join(request.devices)!r:.200}, expected different UUIDs or indices")
    _within("devices", request.count, 1, MAX_DEVICES)
    _limits(request.compute_ppm, request.memory_bytes)
    _within("weight", request.weight, 1, MAX_WEIGHT)
    if request.cpu_milli is not None:
        _within("cpu", request.cpu_milli, 1, 10_000_000)
    if request.host_memory_bytes is not None:
        _within("host memory", request.host_memory_bytes, 1, MAX_BYTES)
    if request.on_fault not in ("run", "refuse"):
        raise BadInput(f"on-fault is {request.on_fault!r:.40}, expected run or refuse")
    if request.enforcement not in ("root", "cooperative", "none"):
        raise BadInput(f"enforcement is {request.enforcement!r:.40}, expected root, cooperative or none")
    return request


def check_resize(resize: ResizeRequest) -> ResizeRequest:
    """The resize, when its values can be honoured. Raises BadInput; one that changes nothing is a mistake."""
    check_id(resize.id)
    _limits(resize.compute_ppm, resize.memory_bytes)
    if resize.compute_ppm is None and resize.memory_bytes is None:
        raise BadInput(f"resize of {resize.id} names no new limit, expected --compute, --memory or both")
    return resize


def _limits(compute_ppm: int | None, memory_bytes: int | None) -> None:
    if compute_ppm is not None:
        _within("compute share (ppm)", compute_ppm, 1, FULL_SHARE_PPM)
    if memory_bytes is not None:
        _within("memory", memory_bytes, 1, MAX_BYTES)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadInput(f"{name} is {value}, expected {low} to {high}")


def _one_of(name: str, value: str | None, kinds: type[WorkloadClass] | type[Environment]) -> None:
    known = [kind.value for kind in kinds]
    if value is not None and value not in known:
        raise BadInput(f"{name} is {value!r:.40}, expected one of {', '.join(known)}")
