"""The sampler: a slim child process that reads one vendor's library on request (`python -m poolmeter.exporter.sampler nvidia 10`:
the vendor, and after how many seconds without an answer it is killed).

A library call that hangs cannot be cancelled, so it happens here, where the agent can kill it. Frames on stdin and stdout: four bytes
of length (big-endian), then JSON. A request is `{"hooked": [[pid, start ticks], ...]}`, whose device time need not be asked; the answer is a VendorReading as plain JSON. The end of stdin ends the child.
"""

import json
import os
import struct
import sys
from typing import BinaryIO

from poolmeter.model.plain import to_plain
from poolmeter.vendors import VENDORS

LENGTH = struct.Struct(">I")


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end of the stream, also in the midst of a frame."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def main(argv: list[str]) -> int:
    """Answer requests until stdin ends."""
    # A library that prints must not break the frames: they go to a private copy, and stdout becomes stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    vendor = VENDORS[argv[1]](float(argv[2]) if len(argv) > 2 else None)
    while (request := read_frame(sys.stdin.buffer)) is not None:
        hooked = frozenset((int(pid), int(start)) for pid, start in json.loads(request).get("hooked", ()))
        body = json.dumps(to_plain(vendor.read(hooked)), separators=(",", ":")).encode()
        try:
            answers.write(LENGTH.pack(len(body)) + body)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # the agent was killed meanwhile: nobody is left to hear, nor anything to flush
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
