"""The messages of the two gRPC services that are asked: kubelet's pod resources (v1) and containerd's containers and namespaces.

Declared field by field instead of generated: it is a page instead of a compiler in the build, and only what is read is named. Fields
that are not named are skipped by protobuf, as are those of a newer server. Numbers are those of the published definitions
(k8s.io/kubelet/pkg/apis/podresources/v1, containerd/api/services).
"""

from functools import cache
from typing import Any

_STRING, _MESSAGE = 9, 11  # FieldDescriptorProto.Type
_ONE, _MANY = 1, 3  # FieldDescriptorProto.Label

# package -> message -> fields as (name, number, repeated, type: None for string, else a message of the same package).
_DEFINITIONS: dict[str, dict[str, tuple[tuple[str, int, bool, str | None], ...]]] = {
    "v1": {
        "ListPodResourcesRequest": (),
        "ListPodResourcesResponse": (("pod_resources", 1, True, "PodResources"),),
        "PodResources": (("name", 1, False, None), ("namespace", 2, False, None), ("containers", 3, True, "ContainerResources")),
        "ContainerResources": (
            ("name", 1, False, None),
            ("devices", 2, True, "ContainerDevices"),
            ("dynamic_resources", 5, True, "DynamicResource"),
        ),
        "ContainerDevices": (("resource_name", 1, False, None), ("device_ids", 2, True, None)),
        "DynamicResource": (
            ("claim_name", 2, False, None),
            ("claim_namespace", 3, False, None),
            ("claim_resources", 4, True, "ClaimResource"),
        ),
        "ClaimResource": (
            ("cdi_devices", 1, True, "CDIDevice"),
            ("driver_name", 2, False, None),
            ("pool_name", 3, False, None),
            ("device_name", 4, False, None),
        ),
        "CDIDevice": (("name", 1, False, None),),
    },
    "containerd.services.containers.v1": {
        "GetContainerRequest": (("id", 1, False, None),),
        "GetContainerResponse": (("container", 1, False, "Container"),),
        # A map is a repeated message of key and value on the wire.
        "Container": (("id", 1, False, None), ("labels", 2, True, "Label"), ("image", 3, False, None)),
        "Label": (("key", 1, False, None), ("value", 2, False, None)),
    },
    "containerd.services.namespaces.v1": {
        "ListNamespacesRequest": (),
        "ListNamespacesResponse": (("namespaces", 1, True, "Namespace"),),
        "Namespace": (("name", 1, False, None),),
    },
}


@cache
def message(package: str, name: str) -> Any:
    """The class of a message. Imports protobuf."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{package}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    for package, messages in _DEFINITIONS.items():
        file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
        for name, fields in messages.items():
            described = file.message_type.add(name=name)
            for field, number, repeated, kind in fields:
                described.field.add(
                    name=field,
                    number=number,
                    label=_MANY if repeated else _ONE,
                    type=_MESSAGE if kind else _STRING,
                    type_name=f".{package}.{kind}" if kind else None,
                )
        pool.Add(file)
    return pool


def call(channel: Any, package: str, service: str, method: str, request: str, response: str, timeout_s: float, **options: Any) -> Any:
    """The answer to one unary call. `options`: `fields` of the request, `metadata`. Raises grpc.RpcError."""
    asked = message(package, request)
    invoke = channel.unary_unary(
        f"/{package}.{service}/{method}",
        request_serializer=asked.SerializeToString,
        response_deserializer=message(package, response).FromString,
    )
    return invoke(asked(**options.get("fields", {})), timeout=timeout_s, metadata=options.get("metadata"))


def channel(socket: str) -> Any:
    """A channel to a Unix socket that is given up rather than waited for. Imports grpc (29 MiB), so only where a socket is."""
    import grpc

    settings = [
        ("grpc.max_receive_message_length", 16 << 20),
        ("grpc.enable_http_proxy", 0),
        # A node's socket comes back within seconds of its daemon.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Some servers do not take the socket's path for a host's name.
        ("grpc.default_authority", "localhost"),
    ]
    return grpc.insecure_channel(f"unix:{socket}", options=settings)


def reason_of(error: Any) -> str:
    """One clause of a grpc.RpcError."""
    code = error.code() if callable(getattr(error, "code", None)) else None
    details = error.details() if callable(getattr(error, "details", None)) else str(error)
    return (
        f"{code.name.lower().replace('_', ' ') if code is not None else 'error'}: {str(details).splitlines()[0] if details else ''!s:.160}"
    )
