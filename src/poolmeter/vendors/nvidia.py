"""NVIDIA through NVML (PyPI nvidia-ml-py, module `pynvml`). Meant for a child process: a call into the library can hang for ever.

Every card is read by a thread of its own (the binding lets go of the interpreter during a call), so a card whose calls are slow or hang
keeps only itself waiting: its last values stay, marked, and the others are fresh. A lost card says so on any call. The simulated pool
is this code on the simulated library, found by the loader's search path.
"""

import contextlib
import threading
import time
import uuid as uuids
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from poolmeter.model.hardware import BusFunction
from poolmeter.vendors.mps import MpsClient, MpsControl
from poolmeter.vendors.nvidia_card import Card, identify
from poolmeter.vendors.nvidia_events import Xids
from poolmeter.vendors.nvml import LostDevice, Nvml, ReplacedDriver, text
from poolmeter.vendors.pci import SYSFS, bus_key, read_functions
from poolmeter.vendors.reading import DeviceReading, VendorReading
from poolmeter.vendors.workers import Worker, wait_all

FIRST_PATIENCE_S = 5.0  # the first reading of a process waits this long: a card that is not in it counts as not there
PATIENCE_S = 0.4
HUNG_S = 5.0  # a card whose reading takes longer than this is no longer shown with what it said before
SELDOM_US = 10_000_000


@dataclass
class _Slot:
    """The card that has an index: its thread, and what the thread found last."""

    worker: Worker
    reading: DeviceReading | None = None
    uuid: str | None = None
    fresh: bool = False
    replaced: str | None = None


class NvidiaVendor:
    """Reads every NVIDIA device, and integrates utilisation from reading to reading."""

    name = "nvidia"

    def __init__(
        self,
        proc: Path = Path("/proc"),
        sysfs: Path = SYSFS,
        patience_s: float | None = None,
        mps: MpsControl | None = None,
        first_patience_s: float = FIRST_PATIENCE_S,
    ) -> None:
        """`patience_s`: how long a reading waits for slow cards (the first one: `first_patience_s`); None: for ever."""
        import pynvml

        self._nvml = Nvml(pynvml)
        self._proc, self._sysfs = proc, sysfs
        self._patience_s, self._first_patience_s = patience_s, max(first_patience_s, patience_s or 0.0)
        self._origin = uuids.uuid4().hex
        self._started = False
        self._answered = False
        self._slots: dict[int, _Slot] = {}
        self._cards: dict[str, Card] = {}
        self._lock = threading.Lock()  # over _cards, which threads of all cards use; never held during a call into the library
        self._xids = Xids(self._nvml)
        self._events = Worker("events")
        self._mps, self._mps_worker = mps or MpsControl(proc=proc), Worker("mps")
        self._mps_clients: tuple[MpsClient, ...] | None = None
        self._mps_at_us = self._functions_at_us = -SELDOM_US
        self._functions: tuple[BusFunction, ...] = ()
        self._driver: str | None = None
        self._hooked: frozenset[tuple[int, int]] = frozenset()

    def read(self, hooked: frozenset[tuple[int, int]] = frozenset()) -> VendorReading:
        """All devices now; `error` when the library is missing or refuses. `hooked` are processes (pid, start ticks) whose device time their own hook tells."""
        self._hooked = hooked
        began = time.monotonic_ns()
        at_us = time.time_ns() // 1000
        devices: list[DeviceReading] = []
        unidentified, hung_s = 0, 0.0
        error, replaced = None, False
        try:
            count = self._start()
            for index in range(count):
                if index not in self._slots:
                    self._slots[index] = _Slot(Worker(f"card {index}"))
            slots = [self._slots[index] for index in range(count)]
            threads = self._threads()
            for index, slot in enumerate(slots):
                self._begin(index, slot, threads)
            self._events.start(self._guarded(self._xids.drain))
            workers = [*(slot.worker for slot in slots), self._events]
            first, self._answered = not self._answered, True
            wait_all(workers, self._first_patience_s if first and self._patience_s is not None else self._patience_s)
            hung_s = max((worker.busy_s for worker in workers), default=0.0)
            for slot in slots:
                if slot.replaced is not None:
                    raise ReplacedDriver(slot.replaced)
                reading = self._taken(slot)
                if reading is None:
                    unidentified += 1
                else:
                    devices.append(reading)
        except (self._nvml.binding.NVMLError, LostDevice, ReplacedDriver) as fault:
            devices, error = [], f"NVML does not answer: {fault}"
            replaced = isinstance(fault, ReplacedDriver) or not self._forget()
        return VendorReading(
            vendor=self.name,
            origin=self._origin,
            at_us=at_us,
            duration_us=(time.monotonic_ns() - began) // 1000,
            devices=tuple(devices),
            error=error,
            unidentified=unidentified,
            hung_us=int(hung_s * 1_000_000),
            replace=replaced,
            functions=self._bus(devices),
        )

    def _start(self) -> int:
        """The library, begun if it is not; and how many cards it lists."""
        if not self._started:
            self._nvml.call("nvmlInit")
            self._started = True
            self._driver = text(self._nvml.call("nvmlSystemGetDriverVersion"))
            self._xids.begin()
        return int(self._nvml.call("nvmlDeviceGetCount"))

    def _forget(self) -> bool:
        """Shut down, so that the next reading starts anew; what was integrated keeps its value. False: a thread is still inside the library."""
        if any(slot.worker.busy_s for slot in self._slots.values()) or self._events.busy_s:
            return False
        if self._started:
            with contextlib.suppress(self._nvml.binding.NVMLError, LostDevice, ReplacedDriver):
                self._nvml.call("nvmlShutdown")
        self._started = False
        self._xids.forget()
        for card in self._cards.values():
            card.forget()
        return True

    # ---- cards -------------------------------------------------------------------------------------------------------------------

    def _begin(self, index: int, slot: _Slot, threads: Mapping[int, int]) -> None:
        """Let the card's thread read it; one that is still at the last reading goes on with that."""
        if slot.worker.busy_s == 0.0:
            slot.fresh = False
            slot.worker.start(lambda: self._work(index, slot, threads))

    def _work(self, index: int, slot: _Slot, threads: Mapping[int, int]) -> None:
        try:
            slot.reading = self._device(index, slot, threads)
        except ReplacedDriver as fault:
            slot.replaced = str(fault)
        except Exception as fault:  # whatever one card does to us, the others are read
            slot.reading = self._down(slot, f"cannot be read: {fault!r}")
        slot.fresh = True

    def _device(self, index: int, slot: _Slot, threads: Mapping[int, int]) -> DeviceReading | None:
        try:
            handle = self._nvml.call("nvmlDeviceGetHandleByIndex", index)
            uuid = text(self._nvml.call("nvmlDeviceGetUUID", handle))
            with self._lock:
                card = self._cards.get(uuid)
            if card is None:
                card = Card(self._nvml, identify(self._nvml, index, handle, uuid, self._driver), self._proc)
                with self._lock:
                    self._cards[uuid] = card
            slot.uuid = uuid
            card.identity = replace(card.identity, index=index, driver_version=self._driver)
            self._xids.watch(uuid, handle)
            return card.read(handle, threads, self._hooked)
        except LostDevice as lost:
            return self._down(slot, str(lost))
        except self._nvml.binding.NVMLError as fault:
            return self._down(slot, f"no handle: {fault}")

    def _down(self, slot: _Slot, reason: str) -> DeviceReading | None:
        card = self._cards.get(slot.uuid) if slot.uuid is not None else None
        return replace(card.identity, up=False, reason=reason) if card else None

    def _taken(self, slot: _Slot) -> DeviceReading | None:
        """The slot's last reading, marked when it is not of this time; none but the identity once the card has been silent for long."""
        reading, busy_s = slot.reading, slot.worker.busy_s
        if not slot.fresh and busy_s > HUNG_S:
            reading = self._down(slot, f"a call has not come back for {busy_s:.0f} s")
        elif not slot.fresh and reading is not None:
            reading = replace(reading, hardware=replace(reading.hardware, stale=True))
        if reading is None:
            return None
        return replace(reading, hardware=replace(reading.hardware, xids=self._xids.of(reading.uuid)))

    # ---- beside the cards --------------------------------------------------------------------------------------------------------

    def _guarded(self, job: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            with contextlib.suppress(Exception):
                job()

        return guarded

    def _threads(self) -> dict[int, int]:
        """Active thread percentages by pid; the daemon is asked now and then, and only where a server was seen on a card."""
        now_us = time.monotonic_ns() // 1000
        served = any(slot.reading is not None and slot.reading.hardware.mps_server_pid is not None for slot in self._slots.values())
        if served and now_us - self._mps_at_us >= SELDOM_US and self._mps_worker.start(self._guarded(self._ask_mps)):
            self._mps_at_us = now_us
        clients = self._mps_clients if served else None
        return {client.pid: client.active_thread_ppm for client in clients or () if client.active_thread_ppm is not None}

    def _ask_mps(self) -> None:
        self._mps_clients = self._mps.read()

    def _bus(self, devices: list[DeviceReading]) -> tuple[BusFunction, ...]:
        now_us = time.monotonic_ns() // 1000
        if now_us - self._functions_at_us >= SELDOM_US:
            self._functions_at_us = now_us
            self._functions = read_functions((device.pci_bus_id for device in devices if device.pci_bus_id), self._sysfs)
        listed = {bus_key(device.pci_bus_id) for device in devices if device.pci_bus_id}
        return tuple(item for item in self._functions if item.state == "mediated" or item.pci_bus_id not in listed)


def sampled_nvidia(timeout_s: float | None = None) -> NvidiaVendor:
    """As the sampler child reads: a tick does not wait long for a slow card, and the first not as long as whoever asks has patience."""
    first = FIRST_PATIENCE_S if timeout_s is None else min(FIRST_PATIENCE_S, timeout_s / 2)
    return NvidiaVendor(patience_s=min(PATIENCE_S, first), first_patience_s=first)


__all__ = ["NvidiaVendor", "sampled_nvidia"]
