"""A real exporter process for tests: the agent, spool and server, over a fake card, with time running sixty times as fast.

Arguments: root folder, base of the clock (CLOCK_BOOTTIME in ns). Prints its URL, then turns until it is killed.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from exporter_fakes import CARD, T0, FakeSampler

from poolmeter.exporter.agent import Agent, Settings
from poolmeter.exporter.server import Face, Server, listen
from poolmeter.exporter.spool import Spool
from poolmeter.places import NodeData, NodeRun

SPEED = 60


class FastClock:
    """Sixty seconds a second."""

    def __init__(self, base_ns: int) -> None:
        self._base_ns = base_ns

    def monotonic_us(self) -> int:
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - self._base_ns) * SPEED // 1000

    def wall_us(self) -> int:
        return T0 + self.monotonic_us()


def main() -> None:
    root, clock = Path(sys.argv[1]), FastClock(int(sys.argv[2]))
    sampler = FakeSampler(clock, CARD)  # type: ignore[arg-type]
    data = NodeData(root / "data")
    spool = Spool(data.spool, "node-a", ("collector",))
    agent = Agent(Settings(node="node-a", pool="lab", interval_ms=3000), NodeRun(root / "run"), data, spool, sampler, clock)
    agent.turn(0)
    server = Server(Face(agent, None).application(), listen("127.0.0.1", 0))
    server.start()
    print(server.url, flush=True)
    while True:
        time.sleep(0.05)
        agent.turn(0)


if __name__ == "__main__":
    main()
