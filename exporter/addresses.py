"""Where this node's exporters answer, for commands that are not told: those of a running pool, else the configured one."""

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolmeter.errors import BadInput

if TYPE_CHECKING:
    from poolmeter.config import ExporterSection


def running_pool(data: Path) -> dict[str, Any]:
    """What `poolmeter up` says of its pool in the data folder; empty where none runs. One of another user's runs, too."""
    try:
        state = json.loads((data / "up.json").read_bytes())
        pid = int(state["pids"]["up"])
        if pid <= 0:
            return {}  # these name groups of processes
        os.kill(pid, 0)
    except PermissionError as error:
        if error.filename is not None:
            return {}  # the file may not be read; else there is such a process, and it is another user's
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}  # no pool, or one that was killed and left its file behind
    return dict(state)


def configured_url(exporter: "ExporterSection") -> str:
    """The URL of the configured exporter. A web configuration that cannot be read, say as it is another user's, is taken for one without TLS."""
    scheme = "http"
    if exporter.web_config_file is not None:
        from poolmeter.web.config import speaks_tls

        with contextlib.suppress(BadInput):
            scheme = "https" if speaks_tls(exporter.web_config_file) else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(exporter.host, exporter.host)
    return f"{scheme}://[{host}]:{exporter.port}" if ":" in host else f"{scheme}://{host}:{exporter.port}"
