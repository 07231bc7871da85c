"""Devices: identity, memory, utilisation, energy, temperature, clocks, counters of errors and bytes. Never labelled with whose they are."""

from collections.abc import Callable, Sequence

from poolmeter.exporter.collectors.family import Family, Page, Rows, Samples, by_rows, ratio, scaled, seconds
from poolmeter.model.hardware import Activity, Hardware, XidCount
from poolmeter.model.snapshot import DeviceSnapshot


def devices_of(page: Page) -> Sequence[DeviceSnapshot]:
    """The devices of a page."""
    return page.snapshot.devices


def _uuid(device: DeviceSnapshot) -> tuple[str, ...]:
    return (device.uuid,)


def per_device(
    name: str, text: str, value: Callable[[DeviceSnapshot], int | None], scale: Callable[[int], float] = float, counter: bool = False
) -> Family:
    """A family with one series a device, of a value that may be absent."""

    rows = Rows(devices_of, _uuid, value, scaled(scale))
    return by_rows(f"poolmeter_device_{name}", "counter" if counter else "gauge", text, ("uuid",), rows)


def _info(page: Page) -> Samples:
    for d in page.snapshot.devices:
        yield (
            (
                d.driver_version or "",
                str(d.index),
                "" if d.mig is None else str(d.mig).lower(),
                "" if d.minor is None else str(d.minor),
                d.model,
                d.pci_bus_id or "",
                page.snapshot.pool or "",
                d.serial or "",
                d.uuid,
                d.vendor,
            ),
            1.0,
        )


def _hardware(value: Callable[[Hardware], int | None]) -> Callable[[DeviceSnapshot], int | None]:
    return lambda d: value(d.hardware) if d.hardware is not None else None


def _flag(value: bool | None) -> int | None:
    return None if value is None else int(value)


def _temperature(page: Page) -> Samples:
    for d in page.snapshot.devices:
        memory = d.hardware.memory_temperature_celsius if d.hardware else None
        for sensor, value in (("gpu", d.temperature_celsius), ("memory", memory)):
            if value is not None:
                yield (sensor, d.uuid), float(value)


def _clocks(page: Page) -> Samples:
    for d in page.snapshot.devices:
        hardware = d.hardware or Hardware()
        clocks = (
            ("graphics", hardware.graphics_clock_hz),
            ("memory", d.memory_clock_hz),
            ("sm", d.sm_clock_hz),
            ("video", hardware.video_clock_hz),
        )
        for domain, value in clocks:
            if value is not None:
                yield (domain, d.uuid), float(value)


def _by_key(values: Callable[[Hardware], dict[str, int]], scale: Callable[[int], float] = float) -> Callable[[Page], Samples]:
    def samples(page: Page) -> Samples:
        for device in page.snapshot.devices:
            for key, value in sorted(values(device.hardware).items()) if device.hardware else ():
                yield (key, device.uuid), scale(value)

    return samples


def _xids(value: Callable[[XidCount], float]) -> Callable[[Page], Samples]:
    def samples(page: Page) -> Samples:
        for device in page.snapshot.devices:
            for xid in device.hardware.xids if device.hardware else ():
                yield (device.uuid, str(xid.xid)), value(xid)

    return samples


def _activity(name: str, text: str, value: Callable[[Activity], int | None]) -> Family:
    def found(hardware: Hardware) -> int | None:
        return value(hardware.activity) if hardware.activity is not None else None

    return per_device(name, text + " over the last second or so, 0 to 1; Hopper and newer (GPM).", _hardware(found), ratio)


def _modes(page: Page) -> Samples:
    for d in page.snapshot.devices:
        h = d.hardware
        if h is not None and (h.compute_mode or h.virtualization or h.persistence is not None):
            flags = {
                name: "" if value is None else str(value).lower()
                for name, value in (("a", h.accounting), ("e", h.ecc), ("p", h.persistence))
            }
            yield (flags["a"], h.compute_mode or "", flags["e"], flags["p"], d.uuid, h.virtualization or ""), 1.0


def _processes(page: Page) -> Samples:
    # Without its own list the device says nothing of programs without the hook: 0 would be a claim.
    counts = {(hooked, d.uuid): 0 for d in page.snapshot.devices if d.up for hooked in (False, True)}
    for process in page.snapshot.processes:
        key = (process.hooked, process.device_uuid)
        if key in counts:
            counts[key] += 1
    known = {d.uuid for d in page.snapshot.devices if d.unaccounted_memory_bytes is not None}
    for (hooked, uuid), count in counts.items():
        if hooked or count or uuid in known:
            yield (str(hooked).lower(), uuid), float(count)


FAMILIES: tuple[Family, ...] = (
    Family(
        "poolmeter_device_info",
        "gauge",
        "Identity of a device, always 1 (NVML).",
        ("driver_version", "index", "mig", "minor", "model", "pci_bus_id", "pool", "serial", "uuid", "vendor"),
        _info,
    ),
    per_device("up", "Whether the device answers, 1 or 0 (NVML).", lambda d: int(d.up)),
    per_device("memory_total_bytes", "Memory of the device in bytes (NVML).", lambda d: d.memory_total_bytes),
    per_device("memory_used_bytes", "Memory in use on the device in bytes, by any process (NVML).", lambda d: d.memory_used_bytes),
    per_device("memory_reserved_bytes", "Memory that driver and firmware keep in bytes (NVML).", lambda d: d.memory_reserved_bytes),
    per_device(
        "utilization_ratio",
        "Part of the last sample period in which a kernel ran, 0 to 1 (NVML).",
        lambda d: d.utilization_ppm,
        ratio,
    ),
    per_device(
        "busy_seconds_total",
        "Time in which a kernel of any process ran in seconds (NVML utilisation samples, integrated).",
        lambda d: d.busy_us_total,
        seconds,
        counter=True,
    ),
    per_device(
        "energy_joules_total",
        "Energy that the board drew in joules (NVML energy counter).",
        lambda d: d.energy_uj_total,
        seconds,
        counter=True,
    ),
    per_device(
        "allocated_ratio",
        "Device time promised to running allocations; above 1 on an over-committed device (allocations).",
        lambda d: d.allocated_ppm,
        ratio,
    ),
    per_device(
        "memory_allocated_bytes", "Memory promised to running allocations in bytes (allocations).", lambda d: d.memory_allocated_bytes
    ),
    Family(
        "poolmeter_device_processes",
        "gauge",
        "Processes on the device, with the hook and without (hook and NVML).",
        ("hooked", "uuid"),
        _processes,
    ),
    per_device("power_watts", "Power that the board draws in watts (NVML).", lambda d: d.power_mw, lambda mw: mw / 1000),
    per_device(
        "power_limit_watts", "Limit of power in force in watts (NVML).", _hardware(lambda h: h.power_limit_mw), lambda mw: mw / 1000
    ),
    Family("poolmeter_device_temperature_celsius", "gauge", "Temperature in degrees Celsius (NVML).", ("sensor", "uuid"), _temperature),
    Family("poolmeter_device_clock_hertz", "gauge", "Clock in hertz (NVML).", ("domain", "uuid"), _clocks),
    Family(
        "poolmeter_device_throttle_seconds_total",
        "counter",
        "Time for which a reason held the clocks down in seconds (NVML policy counters, else clock event reasons, integrated).",
        ("reason", "uuid"),
        _by_key(lambda h: h.throttle_us_total, seconds),
    ),
    Family(
        "poolmeter_device_ecc_errors_total",
        "counter",
        "Memory errors over the life of the board (NVML ECC, aggregate).",
        ("error", "uuid"),
        _by_key(lambda h: h.ecc_errors_total),
    ),
    Family(
        "poolmeter_device_remapped_rows_total",
        "counter",
        "Rows of memory that were replaced, by the kind of error that made it so (NVML).",
        ("cause", "uuid"),
        _by_key(lambda h: h.remapped_rows_total),
    ),
    per_device(
        "row_remap_pending",
        "Whether a row waits for a reset to be replaced, 1 or 0 (NVML).",
        _hardware(lambda h: _flag(h.row_remap_pending)),
    ),
    per_device("row_remap_failed", "Whether a row could not be replaced, 1 or 0 (NVML).", _hardware(lambda h: _flag(h.row_remap_failed))),
    Family(
        "poolmeter_device_xid_errors_total",
        "counter",
        "Xid errors told since counting began, kept over restarts (NVML events).",
        ("uuid", "xid"),
        _xids(lambda x: float(x.count)),
    ),
    Family(
        "poolmeter_device_xid_last_timestamp_seconds",
        "gauge",
        "When an Xid was told last, in seconds since the Unix epoch (NVML events).",
        ("uuid", "xid"),
        _xids(lambda x: seconds(x.last_us)),
    ),
    per_device(
        "pcie_transmit_bytes_total", "Bytes sent over PCIe (NVML byte counter).", _hardware(lambda h: h.pcie_tx_bytes_total), counter=True
    ),
    per_device(
        "pcie_receive_bytes_total",
        "Bytes received over PCIe (NVML byte counter).",
        _hardware(lambda h: h.pcie_rx_bytes_total),
        counter=True,
    ),
    per_device(
        "nvlink_transmit_bytes_total",
        "Data bytes sent over all NVLinks (NVML).",
        _hardware(lambda h: h.nvlink_tx_bytes_total),
        counter=True,
    ),
    per_device(
        "nvlink_receive_bytes_total",
        "Data bytes received over all NVLinks (NVML).",
        _hardware(lambda h: h.nvlink_rx_bytes_total),
        counter=True,
    ),
    _activity("graphics_active_ratio", "Time in which any compute or graphics work ran", lambda a: a.graphics_ppm),
    _activity("sm_active_ratio", "Part of the SMs that were busy", lambda a: a.sm_active_ppm),
    _activity("sm_occupancy_ratio", "Part of the warps that were resident", lambda a: a.sm_occupancy_ppm),
    _activity("tensor_active_ratio", "Time in which tensor cores worked", lambda a: a.tensor_ppm),
    _activity("dram_active_ratio", "Part of the memory bandwidth in use", lambda a: a.dram_ppm),
    Family(
        "poolmeter_device_modes_info",
        "gauge",
        "Modes of a device as they are set, always 1; never changed here (NVML).",
        ("accounting", "compute_mode", "ecc", "persistence", "uuid", "virtualization"),
        _modes,
    ),
    per_device(
        "licensed", "Whether the vGPU software of this guest has its licence, 1 or 0 (NVML).", _hardware(lambda h: _flag(h.licensed))
    ),
    per_device(
        "sample_timestamp_seconds",
        "When the device's values were read, in seconds since the Unix epoch.",
        _hardware(lambda h: h.at_us),
        seconds,
    ),
    per_device(
        "stale",
        "Whether the values are older than the last tick because a call did not come back in time, 1 or 0.",
        _hardware(lambda h: int(h.stale) if h.at_us is not None else None),
    ),
)
