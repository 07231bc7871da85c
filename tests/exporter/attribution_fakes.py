"""Fakes of what attribution asks: a /proc, a kubelet and a containerd that speak gRPC, a Docker or Podman that speaks HTTP, on sockets of our own."""

import contextlib
import json
import os
import shutil
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import grpc

from poolmeter.exporter.attribution.grpc_messages import message
from poolmeter.exporter.attribution.source import ProcessKey

POD_UID = "11111111-2222-3333-4444-555555555555"
OTHER_UID = "99999999-2222-3333-4444-555555555555"
CID = "a" * 64
CID2 = "b" * 64
PATH = f"/kubepods.slice/kubepods-pod{POD_UID.replace('-', '_')}.slice/cri-containerd-{CID}.scope"
MAP = b"7f0000000000-7f0000001000 r-xp 00000000 08:01 123   %s\n"


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name: a socket's address has at most 107 bytes, and a test's folder may have more."""
    folder = tempfile.mkdtemp(prefix="pm-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class FakeProc:
    """A /proc in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / "self" / "ns").mkdir(parents=True, exist_ok=True)

    def add(
        self,
        pid: int,
        start: int = 100,
        cgroup: str | bytes = "/",
        uid: int = 0,
        parent: int = 1,
        maps: bytes | None = None,
        inner: tuple[int, ...] = (),
    ) -> ProcessKey:
        """A process; `cgroup` a v2 path, or all of its cgroup file as bytes."""
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 {start} 1 1")
        pids = "\t".join(str(number) for number in (pid, *inner))
        (folder / "status").write_text(f"Name:\tcuda\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pids}\n")
        (folder / "cgroup").write_bytes(cgroup if isinstance(cgroup, bytes) else f"0::{cgroup}\n".encode("utf-8", "surrogateescape"))
        if maps is not None:
            (folder / "maps").write_bytes(maps)
        return ProcessKey(pid, start)

    def end(self, pid: int) -> None:
        """The process is gone."""
        shutil.rmtree(self.root / str(pid))


class FakeKubelet:
    """The pod-resources service of a kubelet, with the pods a test gives it. Asked for anything else, it fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pods: list[dict[str, Any]] = []
        self.calls = 0
        self.delay_s = 0.0
        self.failure: grpc.StatusCode | None = None
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Listen."""
        handler = grpc.method_handlers_generic_handler(
            "v1.PodResourcesLister",
            {
                "List": grpc.unary_unary_rpc_method_handler(
                    self._list,
                    request_deserializer=message("v1", "ListPodResourcesRequest").FromString,
                    response_serializer=message("v1", "ListPodResourcesResponse").SerializeToString,
                )
            },
        )
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((handler,))
        assert self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def _list(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.failure is not None:
            context.abort(self.failure, "the kubelet says no")
        return message("v1", "ListPodResourcesResponse")(pod_resources=self.pods)

    def stop(self) -> None:
        """End; the socket goes with it."""
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        self.path.unlink(missing_ok=True)


def pod(namespace: str, name: str, container: str, *ids: str, resource: str = "nvidia.com/gpu", **more: Any) -> dict[str, Any]:
    """A pod as the kubelet lists it."""
    devices = [{"resource_name": resource, "device_ids": list(ids)}] if ids else []
    return {"namespace": namespace, "name": name, "containers": [{"name": container, "devices": devices, **more}]}


class FakeContainerd:
    """containerd's namespaces and containers."""

    def __init__(self, path: Path, containers: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
        self.containers = containers
        self.asked: list[tuple[str, str]] = []
        names, boxes = "containerd.services.namespaces.v1", "containerd.services.containers.v1"
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    f"{names}.Namespaces",
                    {
                        "List": grpc.unary_unary_rpc_method_handler(
                            lambda _, __: message(names, "ListNamespacesResponse")(
                                namespaces=[{"name": name} for name in dict.fromkeys(space for space, _ in self.containers)]
                            ),
                            request_deserializer=message(names, "ListNamespacesRequest").FromString,
                            response_serializer=message(names, "ListNamespacesResponse").SerializeToString,
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    f"{boxes}.Containers",
                    {
                        "Get": grpc.unary_unary_rpc_method_handler(
                            self._get,
                            request_deserializer=message(boxes, "GetContainerRequest").FromString,
                            response_serializer=message(boxes, "GetContainerResponse").SerializeToString,
                        )
                    },
                ),
            )
        )
        assert self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def _get(self, request: Any, context: grpc.ServicerContext) -> Any:
        space = dict(context.invocation_metadata())["containerd-namespace"]
        self.asked.append((str(space), request.id))
        found = self.containers.get((str(space), request.id))
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such container")
        assert found is not None
        labels = [{"key": key, "value": value} for key, value in found["labels"].items()]
        container = {"id": request.id, "image": found["image"], "labels": labels}
        return message("containerd.services.containers.v1", "GetContainerResponse")(container=container)

    def stop(self) -> None:
        """End."""
        self._server.stop(None).wait()


class FakeDocker(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The Engine API over a Unix socket: containers by id; or, with `raw`, these bytes to every request, then silence of `silence_s`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path) -> None:
        self.containers: dict[str, Any] = {}
        self.raw: bytes | None = None
        self.silence_s = 0.0
        self.asked: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(str(path), _Handler)
        self.path = path
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def add(self, container_id: str, name: str, image: str = "cuda:13", **labels: str) -> None:
        """A container as `docker inspect` shows it."""
        labels = {key.replace("__", "."): value for key, value in labels.items()}
        self.containers[container_id] = {"Id": container_id, "Name": f"/{name}", "Config": {"Image": image, "Labels": labels}}

    def stop(self) -> None:
        """End; the socket goes with it."""
        self.shutdown()
        self.server_close()
        self.path.unlink(missing_ok=True)


class _Handler(BaseHTTPRequestHandler):
    server: FakeDocker

    def address_string(self) -> str:
        return "local"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.raw is not None:
            with contextlib.suppress(OSError):
                self.wfile.write(self.server.raw)
                self.wfile.flush()
                deadline = time.monotonic() + self.server.silence_s
                while time.monotonic() < deadline:
                    time.sleep(0.02)
                    self.wfile.write(b" ")
            return
        parts = self.path.split("/")
        assert parts[1] == "containers" and parts[3] == "json", self.path
        found = self.server.containers.get(parts[2])
        body = json.dumps(found if found is not None else {"message": "No such container"}).encode()
        self.send_response(200 if found is not None else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def log_names(logs: Path, namespace: str, name: str, uid: str, containers: Mapping[str, str]) -> None:
    """The folders and links that a kubelet makes for a pod; `containers` by name."""
    for container, identity in containers.items():
        (logs / "pods" / f"{namespace}_{name}_{uid}" / container).mkdir(parents=True, exist_ok=True)
        (logs / "containers").mkdir(exist_ok=True)
        link = logs / "containers" / f"{name}_{namespace}_{container}-{identity}.log"
        os.symlink(f"/nowhere/{container}/0.log", link)
