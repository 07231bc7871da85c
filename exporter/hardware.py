"""Counters of the hardware carried on: whatever starts anew behind them (a driver, a sampler, a cleared register), none goes down.

What is kept lies in the ledger, so it survives the exporter too: under `uuid|name|key`, the total before the counter's last new start, what
it said last, and of Xids when, and a mark of the reader that said so.
"""

import zlib
from dataclasses import replace
from typing import TypeVar

from poolmeter.model.hardware import Hardware, MigInstance, Vgpu, XidCount
from poolmeter.vendors.reading import DeviceReading, VendorReading

Kept = dict[str, list[int]]
Part = TypeVar("Part", MigInstance, Vgpu)
_NUMBERS = ("pcie_tx_bytes_total", "pcie_rx_bytes_total", "nvlink_tx_bytes_total", "nvlink_rx_bytes_total")
_MAPS = ("throttle_us_total", "ecc_errors_total", "remapped_rows_total")


class HardwareTotals:
    """Totals of every counter of every device."""

    def __init__(self, kept: Kept, origin: str) -> None:
        """`kept` is the ledger's, and is changed here; `origin` names since when it counts."""
        self._kept, self._origin = kept, origin
        self._absent: set[str] = set()

    def carry(self, reading: VendorReading) -> VendorReading:
        """The reading with totals in place of the raw counters; Xids stay when the card is lost."""
        reader = zlib.crc32(reading.origin.encode())
        return replace(reading, devices=tuple(self._device(device, reader) for device in reading.devices))

    def _device(self, device: DeviceReading, reader: int) -> DeviceReading:
        hardware, uuid = device.hardware, device.uuid
        values: dict[str, object] = {"origin": self._origin}
        for name in _NUMBERS:
            raw = getattr(hardware, name)
            if raw is not None:
                values[name] = self._total(raw, uuid, name, "")
        for name in _MAPS:
            values[name] = {key: self._total(raw, uuid, name, key) for key, raw in getattr(hardware, name).items()}
        values["xids"] = self._xids(uuid, hardware, reader)
        if device.up and not hardware.stale:
            self._forget(uuid, hardware)
        if hardware.instances is not None:
            values["instances"] = tuple(self._busy(uuid, part) for part in hardware.instances)
        if hardware.vgpus is not None:
            values["vgpus"] = tuple(self._busy(uuid, part) for part in hardware.vgpus)
        return replace(device, hardware=replace(hardware, **values))  # type: ignore[arg-type]

    def _forget(self, uuid: str, hardware: Hardware) -> None:
        """Lets go of instances and vGPUs that two readings lack: in one, a call for them may have failed."""
        prefix = f"{uuid}|part|"
        for key in [key for key in self._kept if key.startswith(prefix)]:
            part = key.removeprefix(prefix)
            told: tuple[MigInstance | Vgpu, ...] | None = hardware.instances if part.startswith("MIG-") else hardware.vgpus
            if told is None or any(item.uuid == part for item in told):
                self._absent.discard(key)
            elif key in self._absent:
                self._absent.discard(key)
                del self._kept[key]
            else:
                self._absent.add(key)

    def _total(self, raw: int, uuid: str, name: str, key: str) -> int:
        counter = self._kept.setdefault(f"{uuid}|{name}|{key}", [0, 0])
        if raw < counter[1]:
            counter[0] += counter[1]
        counter[1] = raw
        return counter[0] + raw

    def _busy(self, uuid: str, part: Part) -> Part:
        if part.busy_us_total is None:
            return part
        return replace(part, busy_us_total=self._total(part.busy_us_total, uuid, "part", part.uuid))

    def _xids(self, uuid: str, hardware: Hardware, reader: int) -> tuple[XidCount, ...]:
        """Counts of this reader and of those before it: a new one begins at none, so what it says first says nothing of the old one's."""
        prefix = f"{uuid}|xid|"
        for item in hardware.xids:
            self._kept.setdefault(f"{prefix}{item.xid}", [0, 0, 0])
        told = {item.xid: item for item in hardware.xids}
        found = []
        for key, counter in self._kept.items():
            if not key.startswith(prefix):
                continue
            before, count, last_us, *known = counter
            if known != [reader]:
                before, count = before + count, 0
            xid = int(key.removeprefix(prefix))
            if xid in told:
                count, last_us = max(count, told[xid].count), max(last_us, told[xid].last_us)
            counter[:] = before, count, last_us, reader
            found.append(XidCount(xid=xid, count=before + count, last_us=last_us))
        return tuple(sorted(found, key=lambda item: item.xid))


def stale(reading: VendorReading) -> VendorReading:
    """The same reading at a later turn: every device of it is marked as not read at this one."""
    return replace(reading, devices=tuple(replace(device, hardware=replace(device.hardware, stale=True)) for device in reading.devices))
