"""A snapshot as an OTLP request: `hw.*` for devices by OpenTelemetry's conventions, a namespace of our own for slices and processes.

Those conventions know no sharing, so what belongs to a slice or a process is called `poolmeter.slice.*` and `poolmeter.process.*`, with the
attributes (`k8s.*`, `container.*`, `process.*`) by which other telemetry of the same workload is found. A value that is not known is no
point. Counters are cumulative; nothing is folded together, however many slices there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric, NumberDataPoint, ScopeMetrics

from poolmeter.exporter.collectors.family import Page
from poolmeter.exporter.owners import NOBODY, Owner, slice_owners
from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot

_MICRO = 1_000_000
SCHEMA = "https://opentelemetry.io/schemas/1.38.0"


@dataclass(frozen=True)
class Instrument:
    """`kind` counter, updown or gauge; `value` gives an int or a float of `unit`, None: no point."""

    name: str
    unit: str
    kind: str
    description: str
    value: Callable[[Any], float | int | None]
    attributes: tuple[tuple[str, str], ...] = ()


def _per(value: int | None, unit: int) -> float | None:
    return None if value is None else value / unit


def _memory_ratio(d: DeviceSnapshot) -> float | None:
    return None if d.memory_used_bytes is None or not d.memory_total_bytes else d.memory_used_bytes / d.memory_total_bytes


_GENERAL = (("hw.gpu.task", "general"),)
DEVICE: tuple[Instrument, ...] = (
    Instrument(
        "hw.gpu.utilization", "1", "gauge", "Part of time in which a kernel ran.", lambda d: _per(d.utilization_ppm, _MICRO), _GENERAL
    ),
    Instrument("hw.gpu.memory.usage", "By", "updown", "Memory in use.", lambda d: d.memory_used_bytes),
    Instrument("hw.gpu.memory.limit", "By", "updown", "Memory of the device.", lambda d: d.memory_total_bytes),
    Instrument("hw.gpu.memory.utilization", "1", "gauge", "Part of the memory in use.", _memory_ratio),
    Instrument("hw.energy", "J", "counter", "Energy drawn.", lambda d: _per(d.energy_uj_total, _MICRO)),
    Instrument("hw.power", "W", "gauge", "Power drawn.", lambda d: _per(d.power_mw, 1000)),
    Instrument("hw.temperature", "Cel", "gauge", "Temperature.", lambda d: d.temperature_celsius),
    Instrument("hw.status", "1", "updown", "Whether the device is in this state.", lambda d: int(d.up), (("hw.state", "ok"),)),
    Instrument("hw.status", "1", "updown", "Whether the device is in this state.", lambda d: int(not d.up), (("hw.state", "failed"),)),
    Instrument("poolmeter.device.busy.time", "s", "counter", "Time in which a kernel ran.", lambda d: _per(d.busy_us_total, _MICRO)),
    Instrument(
        "poolmeter.device.unaccounted.time", "s", "counter", "Use without the hook.", lambda d: _per(d.unaccounted_us_total, _MICRO)
    ),
    Instrument("poolmeter.device.allocated", "1", "gauge", "Device time promised.", lambda d: _per(d.allocated_ppm, _MICRO)),
)
SLICE: tuple[Instrument, ...] = (
    Instrument("poolmeter.slice.promise", "1", "gauge", "Device time promised.", lambda s: _per(s.promise_ppm, _MICRO)),
    Instrument("poolmeter.slice.compute.limit", "1", "gauge", "Limit of device time.", lambda s: _per(s.compute_limit_ppm, _MICRO)),
    Instrument("poolmeter.slice.memory.limit", "By", "updown", "Memory limit.", lambda s: s.memory_limit_bytes),
    Instrument("poolmeter.slice.memory.usage", "By", "updown", "Memory held.", lambda s: s.memory_used_bytes),
    Instrument("poolmeter.slice.busy.time", "s", "counter", "Device time used.", lambda s: _per(s.busy_us_total, _MICRO)),
    Instrument(
        "poolmeter.slice.throttled.time", "s", "counter", "Time waited for the limit.", lambda s: _per(s.throttled_us_total, _MICRO)
    ),
    Instrument("poolmeter.slice.kernel.launches", "{launch}", "counter", "Kernels launched.", lambda s: s.launches_total),
    Instrument("poolmeter.slice.graph.launches", "{launch}", "counter", "Graphs launched.", lambda s: s.graph_launches_total),
    Instrument("poolmeter.slice.denied", "{allocation}", "counter", "Memory allocations refused.", lambda s: s.denied_allocations_total),
    Instrument("poolmeter.slice.energy", "J", "counter", "Part of the board's energy.", lambda s: _per(s.energy_uj_total, _MICRO)),
)
PROCESS: tuple[Instrument, ...] = (
    Instrument("poolmeter.process.busy.time", "s", "counter", "Device time used.", lambda p: _per(p.busy_us_total, _MICRO)),
    Instrument("poolmeter.process.memory.usage", "By", "updown", "Memory held.", lambda p: p.memory_used_bytes),
)


def request_of(page: Page) -> ExportMetricsServiceRequest:
    """Everything of a page as one request."""
    snapshot = page.snapshot
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    named = {"service.name": "poolmeter-exporter", "service.version": page.version, "host.name": snapshot.node}
    resource.resource.attributes.extend(_attributes({**named, "poolmeter.pool": snapshot.pool or ""}))
    resource.schema_url = SCHEMA
    scope = resource.scope_metrics.add()
    scope.scope.name, scope.scope.version = "poolmeter.exporter", page.version
    at_ns = snapshot.taken_us * 1000
    devices = {device.uuid: device for device in snapshot.devices}
    _add(scope, DEVICE, [(device, _attributes(_device(device)), 0) for device in snapshot.devices], at_ns)
    owners = slice_owners(snapshot)
    slices = [
        (part, _attributes(_slice(part, owners.get((part.allocation_id, part.device_uuid), NOBODY))), part.created_us * 1000)
        for part in snapshot.slices
    ]
    _add(scope, SLICE, slices, at_ns)
    _add(scope, PROCESS, [(p, _attributes(_process(p, owners)), 0) for p in snapshot.processes if p.device_uuid in devices], at_ns)
    return request


def _add(scope: ScopeMetrics, instruments: Sequence[Instrument], items: Sequence[tuple[Any, Sequence[KeyValue], int]], at_ns: int) -> None:
    metrics: dict[str, Metric] = {}
    for instrument in instruments:
        extra = _attributes(dict(instrument.attributes))
        for item, attributes, start_ns in items:
            value = instrument.value(item)
            if value is None:
                continue
            metric = metrics.get(instrument.name)
            if metric is None:
                metric = metrics[instrument.name] = scope.metrics.add(
                    name=instrument.name, unit=instrument.unit, description=instrument.description
                )
                if instrument.kind != "gauge":
                    metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
                    metric.sum.is_monotonic = instrument.kind == "counter"
            points = metric.gauge.data_points if instrument.kind == "gauge" else metric.sum.data_points
            point: NumberDataPoint = points.add(time_unix_nano=at_ns)
            if start_ns and instrument.kind != "gauge":
                point.start_time_unix_nano = start_ns
            if isinstance(value, int):
                point.as_int = value
            else:
                point.as_double = value
            point.attributes.extend(attributes)
            point.attributes.extend(extra)


def _device(d: DeviceSnapshot) -> dict[str, str | int]:
    return {
        "hw.id": d.uuid,
        "hw.type": "gpu",
        "hw.name": f"gpu{d.index}",
        "hw.model": d.model,
        "hw.vendor": d.vendor,
        "hw.serial_number": d.serial or "",
        "hw.driver_version": d.driver_version or "",
    }


def _slice(s: SliceSnapshot, owner: Owner) -> dict[str, str | int]:
    return {
        "hw.id": s.device_uuid,
        "hw.type": "gpu",
        "poolmeter.allocation.id": s.allocation_id,
        "poolmeter.mode": s.mode,
        "poolmeter.tenant": s.tenant,
        "poolmeter.project": s.project or "",
        "poolmeter.user": s.user or "",
        "poolmeter.workload": s.workload or "",
        "poolmeter.workload.class": s.workload_class or "",
        "deployment.environment.name": s.environment or "",
        **_owner(owner),
    }


def _owner(owner: Owner) -> dict[str, str | int]:
    return {
        "k8s.namespace.name": owner.namespace,
        "k8s.pod.name": owner.pod,
        "k8s.pod.uid": owner.pod_uid,
        "k8s.container.name": owner.container if owner.pod else "",
        "container.name": "" if owner.pod else owner.container,
        "container.id": owner.container_id,
        "container.image.name": owner.image,
        "poolmeter.job": owner.job,
    }


def _process(p: ProcessSnapshot, owners: dict[tuple[str, str], Owner]) -> dict[str, str | int]:
    return {
        "hw.id": p.device_uuid,
        "hw.type": "gpu",
        "process.pid": p.pid,
        "process.executable.name": p.command or "",
        "poolmeter.allocation.id": p.allocation_id or "",
        "poolmeter.tenant": p.tenant or "",
        "poolmeter.hooked": "true" if p.hooked else "false",
        **_owner(owners.get((p.allocation_id or "", p.device_uuid), NOBODY)),
    }


def _attributes(values: dict[str, Any]) -> list[KeyValue]:
    """Attributes of what is known; lone surrogates of a hostile name become question marks, since protobuf takes none."""
    found = []
    for key, value in values.items():
        if isinstance(value, int):
            found.append(KeyValue(key=key, value=AnyValue(int_value=value)))
        elif value:
            text = value.encode("utf-8", "replace").decode()
            found.append(KeyValue(key=key, value=AnyValue(string_value=text)))
    return found
