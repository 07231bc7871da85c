"""Vendors: facts about devices, one file a vendor. `VENDORS` is the list; the simulated pool is NVIDIA's code on a simulated library."""

from collections.abc import Callable

from poolmeter.vendors.nvidia import sampled_nvidia
from poolmeter.vendors.reading import DeviceReading, ProcessReading, Vendor, VendorReading

# Each is made with how long, in seconds, whoever asks waits for an answer before giving the asked one up.
VENDORS: dict[str, Callable[[float | None], Vendor]] = {"nvidia": sampled_nvidia}

__all__ = ["VENDORS", "DeviceReading", "ProcessReading", "Vendor", "VendorReading"]
