"""One NVIDIA card: what is kept of it between readings, and one reading of it. Every value it does not support is absent."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from poolmeter.model.hardware import Hardware
from poolmeter.vendors.nvidia_accounting import Accounting
from poolmeter.vendors.nvidia_counters import Counters, Health
from poolmeter.vendors.nvidia_gpm import Gpm
from poolmeter.vendors.nvidia_mig import Instances
from poolmeter.vendors.nvidia_use import Use
from poolmeter.vendors.nvidia_vgpu import Vgpus, guest_licence
from poolmeter.vendors.nvml import Nvml, number, optional_text, text, wide
from poolmeter.vendors.reading import DeviceReading

_MHZ = 1_000_000
HEALTH_EVERY_US = 10_000_000  # what changes seldom is asked seldom
# Nothing of these is integrated over turns: clocks and temperature are looked at, the others count by themselves. They are most of what a
# reading costs (on an H200 4.5 ms of CPU for the energy, 2.3 for the counters, 1.8 for a window of activity). They are due at whole multiples
# of wall time, so that what a minute used is known at its end.
SELDOM_US = 5_000_000


class Card:
    """A card by its UUID. `read` is called by one thread at a time."""

    def __init__(self, nvml: Nvml, identity: DeviceReading, proc: Path) -> None:
        self.identity = identity
        self._nvml = nvml
        self._use = Use(nvml, proc)
        self._accounting = Accounting(nvml)
        self._health, self._counters, self._gpm = Health(nvml), Counters(nvml), Gpm(nvml)
        self._instances, self._vgpus = Instances(nvml), Vgpus(nvml)
        self._mig: bool | None = None
        self._health_at_us: int | None = None
        self._seldom: int | None = None
        self._energy_mj: int | None = None
        self._clocks: dict[str, int | None] = {}
        self._celsius: int | None = None
        self._licence: tuple[bool | None, str | None] = (None, None)

    def read(self, handle: Any, threads_ppm: Mapping[int, int], hooked: frozenset[tuple[int, int]] = frozenset()) -> DeviceReading:
        """Everything the card tells now. `threads_ppm` are active thread percentages by pid; `hooked`, by pid and start ticks, whose device time need not be asked.

        Raises LostDevice, ReplacedDriver.
        """
        nvml, ask, errors = self._nvml.binding, self._nvml.value, list[str]()
        at_us, now_us = time.time_ns() // 1000, time.monotonic_ns() // 1000
        memory = ask(errors, "nvmlDeviceGetMemoryInfo", handle, version=nvml.nvmlMemory_v2)
        reserved = wide(memory.reserved) if memory is not None else None
        if memory is None:
            memory = ask(errors, "nvmlDeviceGetMemoryInfo", handle)
        rates = ask(errors, "nvmlDeviceGetUtilizationRates", handle)
        busy = number(rates.gpu) if rates is not None else None
        utilization = min(100, busy) * 10_000 if busy is not None else None
        self._use.threads_ppm = threads_ppm
        self._use.device(handle, utilization, errors)
        listed, known = self._use.lists(handle, errors)
        self._use.integrate(handle, listed, hooked if known else None, errors)
        self._slow(handle, now_us)
        self._look(handle, at_us, now_us, errors)
        host = self._health.virtualization == "host_vgpu"
        hardware = Hardware(
            at_us=at_us,
            power_limit_mw=self._health.power_limit_mw,
            memory_temperature_celsius=self._counters.memory_celsius,
            graphics_clock_hz=self._clocks.get("graphics"),
            video_clock_hz=self._clocks.get("video"),
            compute_mode=self._health.compute_mode,
            persistence=self._health.persistence,
            accounting=self._health.accounting,
            ecc=self._health.ecc,
            virtualization=self._health.virtualization,
            licensed=self._licence[0],
            license_product=self._licence[1],
            throttle_us_total=dict(self._counters.throttle_us),
            ecc_errors_total=dict(self._health.ecc_errors),
            remapped_rows_total=dict(self._health.remapped),
            row_remap_pending=self._health.pending,
            row_remap_failed=self._health.failed,
            pcie_tx_bytes_total=self._counters.pcie_tx,
            pcie_rx_bytes_total=self._counters.pcie_rx,
            nvlink_tx_bytes_total=self._counters.nvlink_tx,
            nvlink_rx_bytes_total=self._counters.nvlink_rx,
            bytes_per_s=dict(self._counters.bytes_per_s),
            activity=self._gpm.activity,
            instances=self._instances.read(handle, now_us) if self._mig else None,
            vgpus=self._vgpus.read(handle) if host else None,
            mps_server_pid=next((pid for pid, item in sorted(listed.items()) if item.mps == "server"), None),
        )
        return replace(
            self.identity,
            memory_total_bytes=(wide(memory.total) if memory is not None else None) or self.identity.memory_total_bytes,
            memory_used_bytes=wide(memory.used) if memory is not None else None,
            memory_reserved_bytes=reserved,
            utilization_ppm=utilization,
            busy_us_total=self._use.busy_us if self._use.known else None,
            unmeasured_us_total=self._use.unmeasured_us,
            energy_uj_total=self._energy_mj * 1000 if self._energy_mj is not None else None,
            power_mw=number(ask(errors, "nvmlDeviceGetPowerUsage", handle)),
            temperature_celsius=self._celsius,
            sm_clock_hz=self._clocks.get("sm"),
            memory_clock_hz=self._clocks.get("memory"),
            mig=self._mig,
            processes=self._accounting.add(handle, self._health.accounting, self._use.readings(listed)),
            processes_known=known,
            errors=tuple(errors),
            hardware=hardware,
        )

    def _look(self, handle: Any, at_us: int, now_us: int, errors: list[str]) -> None:
        due, self._seldom = self._seldom != at_us // SELDOM_US, at_us // SELDOM_US
        if due or self._mig is None:
            mode = self._nvml.value(errors, "nvmlDeviceGetMigMode", handle)
            if mode is not None:
                self._mig = bool(mode[0])  # one that cannot be asked now has not changed
        if self._mig:
            self._gpm.activity, self._gpm.pcie = None, (None, None)
        else:
            self._instances.close()
        if not self._mig and (due or self._gpm.activity is None):  # a window has two ends
            self._gpm.read(handle, now_us)
        if not due:
            self._counters.hold(handle, now_us)
            return
        nvml = self._nvml.binding
        self._energy_mj = wide(self._nvml.value(errors, "nvmlDeviceGetTotalEnergyConsumption", handle))
        self._counters.read(handle, now_us, self._gpm.pcie)
        self._celsius = number(self._nvml.value(errors, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU))
        self._clocks = {
            "sm": self._clock(errors, handle, nvml.NVML_CLOCK_SM),
            "memory": self._clock(errors, handle, nvml.NVML_CLOCK_MEM),
            "graphics": self._clock([], handle, nvml.NVML_CLOCK_GRAPHICS),
            "video": self._clock([], handle, nvml.NVML_CLOCK_VIDEO),
        }

    def _slow(self, handle: Any, now_us: int) -> None:
        if self._health_at_us is not None and now_us - self._health_at_us < HEALTH_EVERY_US:
            return
        self._health_at_us = now_us
        self._health.read(handle)
        self._licence = guest_licence(self._nvml, handle) if self._health.virtualization == "vgpu" else (None, None)

    def _clock(self, errors: list[str], handle: Any, domain: int) -> int | None:
        mhz = number(self._nvml.value(errors, "nvmlDeviceGetClockInfo", handle, domain))
        return None if mhz is None else mhz * _MHZ

    def forget(self) -> None:
        """The library is shut down: what was allocated in it is gone; what was counted stays."""
        self._health_at_us = self._seldom = None
        self._gpm, self._instances = Gpm(self._nvml), Instances(self._nvml)


def identify(nvml: Nvml, index: int, handle: Any, uuid: str, driver: str | None) -> DeviceReading:
    """Who a card is; raises when it does not even say how much memory it has."""
    size = wide(nvml.call("nvmlDeviceGetMemoryInfo", handle).total)
    if size is None:
        raise nvml.binding.NVMLError(nvml.binding.NVML_ERROR_NOT_SUPPORTED)
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
    return DeviceReading(
        uuid=uuid,
        index=index,
        model=text(nvml.ask("nvmlDeviceGetName", handle) or "unknown"),
        vendor="nvidia",
        up=True,
        memory_total_bytes=size,
        pci_bus_id=text(pci.busId) if pci is not None else None,
        minor=number(nvml.ask("nvmlDeviceGetMinorNumber", handle)),
        serial=optional_text(nvml.ask("nvmlDeviceGetSerial", handle)),
        driver_version=driver,
    )
