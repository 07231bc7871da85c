"""Sending a signal to a process of this machine, to that very process and no other."""

import os
import signal

from poolmeter.errors import Refused
from poolmeter.exporter.top.rows import ProcessRow
from poolmeter.vendors.proc import start_ticks_of


def send(row: ProcessRow, number: signal.Signals) -> None:
    """Send it. Raises Refused when the process is another machine's, gone, or not to be signalled by this user.

    The start time is compared while a descriptor holds the process, so that a pid which was given to another one meanwhile is not hit.
    """
    pid = row.process.pid
    if not row.local:
        raise Refused(f"process {pid} is on {row.node}, expected one of this machine")
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise Refused(f"process {pid} cannot be signalled: {error.strerror}") from None
    try:
        if start_ticks_of(pid) != row.process.start_ticks:
            raise Refused(f"process {pid} is another one by now, nothing was sent")
        signal.pidfd_send_signal(descriptor, number)
    except OSError as error:
        raise Refused(f"process {pid} cannot be sent {number.name}: {error.strerror}") from None
    finally:
        os.close(descriptor)
