"""Xids: errors that the driver tells of as events, from registration on. Some (79, 119, 120) may never be told: that a card is lost is
derived from what its calls answer, never from here."""

import ctypes
import time
from typing import Any

from poolmeter.model.hardware import XidCount
from poolmeter.vendors.nvml import LostDevice, Nvml, ReplacedDriver, text

_AT_MOST = 256  # events taken at one reading


class Xids:
    """Counts Xids by card. Counts never go down, also when the event set has to be made anew."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._set: Any = None
        self._registered: dict[str, int] = {}  # uuid to the handle's address
        self._seen: dict[str, dict[int, XidCount]] = {}

    def begin(self) -> None:
        """Make the event set; where the driver has none, no card has Xids."""
        self._set = self._nvml.ask("nvmlEventSetCreate")

    def watch(self, uuid: str, handle: Any) -> None:
        """Register a card once for each handle it has; a card that has no Xid events stays without. Raises nothing; any thread may call."""
        address = _address(handle)
        if self._set is None or self._registered.get(uuid) == address:
            return
        nvml = self._nvml.binding
        try:
            supported = int(self._nvml.call("nvmlDeviceGetSupportedEventTypes", handle))
            if supported & nvml.nvmlEventTypeXidCriticalError:
                self._nvml.call("nvmlDeviceRegisterEvents", handle, nvml.nvmlEventTypeXidCriticalError, self._set)
                self._seen.setdefault(uuid, {})
            self._registered[uuid] = address
        except nvml.NVMLError:
            self._registered[uuid] = address  # not for this card, and not to be asked again while its handle stands
        except (LostDevice, ReplacedDriver):
            return

    def drain(self) -> None:
        """Take every event that waits; does not wait for one."""
        nvml = self._nvml.binding
        for _ in range(_AT_MOST if self._set is not None else 0):
            try:
                event = self._nvml.call("nvmlEventSetWait_v2", self._set, 0)
            except (nvml.NVMLError, LostDevice, ReplacedDriver):
                return  # the time is up, which is the usual end
            if not int(event.eventType) & nvml.nvmlEventTypeXidCriticalError:
                continue
            uuid = self._whose(event.device)
            if uuid is not None:
                counts, xid = self._seen.get(uuid, {}), int(event.eventData)
                before = counts.get(xid)
                now = XidCount(xid=xid, count=(before.count if before else 0) + 1, last_us=time.time_ns() // 1000)
                self._seen[uuid] = {**counts, xid: now}  # another thread may be reading the old one

    def _whose(self, device: Any) -> str | None:
        # A card that just fell off gives no UUID, but its handle is the one that was registered.
        address = _address(device)
        for uuid, known in list(self._registered.items()):
            if known == address:
                return uuid
        found = self._nvml.ask("nvmlDeviceGetUUID", device)
        return None if found is None else text(found)

    def of(self, uuid: str) -> tuple[XidCount, ...]:
        """What a card was told of so far."""
        return tuple(sorted(self._seen.get(uuid, {}).values(), key=lambda item: item.xid))

    def forget(self) -> None:
        """The library is shut down: the set is gone with it, the counts stay."""
        self._set = None
        self._registered.clear()


def _address(handle: Any) -> int:
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except (TypeError, ctypes.ArgumentError):
        return hash(handle)
