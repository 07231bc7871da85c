"""Many launches that do not wait: host time of one, in ns, through whatever driver and hook are in the way. Prints one JSON line.

The calls go through ctypes, whose own cost is in the figure: compare runs, do not quote one.
"""

import ctypes
import json
import time

from poolmeter.simulator.driver import Driver


def main() -> None:
    """The command line."""
    driver = Driver()
    driver.open(0)
    function, stream = driver.function(), driver.stream()
    length = ctypes.c_uint64(1000)
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(length), ctypes.c_void_p))
    launch = driver.library.cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    costs = []
    for _ in range(200):
        began = time.perf_counter_ns()
        for _ in range(200):
            launch(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, None)
        costs.append((time.perf_counter_ns() - began) / 200)
        driver("cuStreamSynchronize", stream)
    print(json.dumps({"launch_ns": sorted(costs)[len(costs) // 2]}))


if __name__ == "__main__":
    main()
