"""Devices: identity, memory, utilisation, energy, temperature, clocks. Never labelled with whose they are."""

from collections.abc import Callable, Sequence

from poolmeter.exporter.collectors.family import Family, Page, Rows, Samples, by_rows, ratio, scaled, seconds
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


def _temperature(page: Page) -> Samples:
    for device in page.snapshot.devices:
        if device.temperature_celsius is not None:
            yield ("gpu", device.uuid), float(device.temperature_celsius)


def _clocks(page: Page) -> Samples:
    for device in page.snapshot.devices:
        for domain, value in (("memory", device.memory_clock_hz), ("sm", device.sm_clock_hz)):
            if value is not None:
                yield (domain, device.uuid), float(value)


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
    Family("poolmeter_device_temperature_celsius", "gauge", "Temperature in degrees Celsius (NVML).", ("sensor", "uuid"), _temperature),
    Family("poolmeter_device_clock_hertz", "gauge", "Clock in hertz (NVML).", ("domain", "uuid"), _clocks),
)
