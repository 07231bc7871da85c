"""GPM: what the hardware did between two samples. Hopper and newer; a window of 100 ms or less gives nothing useful."""

from dataclasses import dataclass
from typing import Any

from poolmeter.model.hardware import Activity
from poolmeter.vendors.nvml import Nvml, percent_ppm

SHORTEST_US = 100_000
_RATIOS = {1: "graphics_ppm", 2: "sm_active_ppm", 3: "sm_occupancy_ppm", 5: "tensor_ppm", 10: "dram_ppm"}
_PCIE = (20, 21)


@dataclass
class Gpm:
    """Two sample buffers of a card, or of one of its GPU instances, used by turns."""

    nvml: Nvml
    instance: int | None = None  # a GPU instance; None: the whole card
    supported: bool | None = None
    activity: Activity | None = None
    pcie: tuple[float | None, float | None] = (None, None)
    busy_us: int | None = None
    _first: Any = None
    _second: Any = None
    _at_us: int | None = None

    def read(self, device: Any, at_us: int) -> None:
        """Take a sample of the card at the monotonic time, and read the window since the last one when that is long enough."""
        nvml = self.nvml.binding
        if self.supported is None:
            support = self.nvml.ask("nvmlGpmQueryDeviceSupport", device)
            self.supported = None if support is None else bool(support.isSupportedDevice)
        if not self.supported:
            return
        if self._at_us is not None and at_us - self._at_us <= SHORTEST_US:
            return
        try:
            if self._second is None:
                self._second = self.nvml.call("nvmlGpmSampleAlloc")
            if self.instance is None:
                self.nvml.call("nvmlGpmSampleGet", device, self._second)
            else:
                self.nvml.call("nvmlGpmMigSampleGet", device, self.instance, self._second)
            if self._at_us is not None:
                self._window(at_us - self._at_us)
        except nvml.NVMLError:
            # Not while MIG is on, or not for this instance: nothing is known, and the next sample begins anew.
            self.activity, self.pcie, self._at_us = None, (None, None), None
            return
        self._first, self._second, self._at_us = self._second, self._first, at_us

    def _window(self, window_us: int) -> None:
        nvml = self.nvml.binding
        ids = (*_RATIOS, *(_PCIE if self.instance is None else ()))
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
        request.sample1, request.sample2 = self._first, self._second
        for place, identifier in enumerate(ids):
            request.metrics[place].metricId = identifier
        self.nvml.call("nvmlGpmMetricsGet", request)
        values = {ids[place]: request.metrics[place].value for place in range(len(ids)) if request.metrics[place].nvmlReturn == 0}
        ratios = {name: percent_ppm(values.get(identifier)) for identifier, name in _RATIOS.items()}
        self.activity = Activity(window_us=window_us, **ratios)
        sent, received = (values.get(identifier) for identifier in _PCIE)
        self.pcie = (_finite(sent), _finite(received))
        graphics = self.activity.graphics_ppm
        if graphics is not None:
            self.busy_us = (self.busy_us or 0) + graphics * window_us // 1_000_000

    def close(self) -> None:
        """Give the buffers back."""
        for sample in (self._first, self._second):
            if sample is not None:
                self.nvml.ask("nvmlGpmSampleFree", sample)
        self._first = self._second = self._at_us = None


def _finite(value: float | None) -> float | None:
    return None if percent_ppm(value) is None or value is None or value < 0 else float(value)
