"""Which enforcers a command talks to: the node it names, the nodes of a running pool, or the node it stands on."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from poolmeter.enforcer.client import EnforcerClient, answers
from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable
from poolmeter.places import NodeRun, data_folder, run_folder

T = TypeVar("T")

_LAST_ERRORS = (Refused, BadInput, Unavailable)


@dataclass(frozen=True)
class KnownNode:
    """An enforcer to talk to. `name` None: it says its name itself."""

    run: NodeRun
    name: str | None = None

    @property
    def client(self) -> EnforcerClient:
        """A client of its enforcer."""
        return EnforcerClient(self.run)


def known_nodes(run_option: str | None, data_option: str | None) -> tuple[KnownNode, ...]:
    """The nodes, in the order to try them; never none.

    --run alone counts when it is given; else $POOLMETER_RUN when a socket is there; else the nodes that `poolmeter up` wrote to
    up.json in the data folder, when one of them answers; else the default run folder.
    """
    if run_option is not None:
        return (KnownNode(NodeRun(Path(run_option).absolute())),)
    local = NodeRun(run_folder())
    if os.environ.get("POOLMETER_RUN") and local.socket.exists():
        return (KnownNode(local),)
    pool = nodes_of_pool(data_folder(data_option) / "up.json")
    if any(answers(node.run.socket) for node in pool):
        return pool
    return (KnownNode(local),)


def nodes_of_pool(path: Path) -> tuple[KnownNode, ...]:
    """The nodes of up.json; none when there is no such file. Raises BadInput for one that cannot be read."""
    try:
        body = json.loads(path.read_bytes())
        return tuple(KnownNode(NodeRun(Path(row["run"])), str(row["name"])) for row in body["nodes"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} cannot be read ({error!r:.80}), expected what poolmeter up wrote") from None


def choose(nodes: Sequence[KnownNode], name: str | None) -> tuple[KnownNode, ...]:
    """The nodes with this name, or all. Raises BadInput when there is none, Unavailable when none answers."""
    if name is None:
        return tuple(nodes)
    named = tuple(node for node in nodes if (node.name or _own_name(node)) == name)
    if not named:
        raise BadInput(f"node is {name!r:.80}, expected one of {', '.join(node.name or _own_name(node) for node in nodes)}")
    return named


def first(nodes: Sequence[KnownNode], ask: Callable[[KnownNode, bool], T]) -> tuple[KnownNode, T]:
    """The first node whose answer is no error, and the answer; `ask` gets True with the last node. Raises the most telling error."""
    errors: list[PoolmeterError] = []
    for index, node in enumerate(nodes):
        try:
            return node, ask(node, index == len(nodes) - 1)
        except _LAST_ERRORS as error:
            errors.append(error)
    # That a node is down says less than that another one refused.
    raise next((error for error in reversed(errors) if not isinstance(error, Unavailable)), errors[-1])


def show(nodes: Sequence[KnownNode], allocation_id: str) -> tuple[KnownNode, dict[str, Any]]:
    """The node that has the allocation, and what it says about it. Raises Refused or Unavailable."""
    return first(nodes, lambda node, _: node.client.show(allocation_id))


def _own_name(node: KnownNode) -> str:
    return str(node.client.ping()["node"])
