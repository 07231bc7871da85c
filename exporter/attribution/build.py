"""The sources of a node, made from its configuration; the one list of them."""

from pathlib import Path

from poolmeter.config import AttributionSection
from poolmeter.exporter.attribution.kubernetes import Kubernetes, KubernetesSettings
from poolmeter.exporter.attribution.naming import TenantRule, parse_pattern
from poolmeter.exporter.attribution.own import OwnAllocations
from poolmeter.exporter.attribution.runtimes import Runtime, RuntimeSettings
from poolmeter.exporter.attribution.slurm import Slurm
from poolmeter.exporter.attribution.sockets import Use
from poolmeter.exporter.attribution.source import Attribution
from poolmeter.exporter.attribution.users import Units, UserNames, Users
from poolmeter.exporter.attribution.who import Allocations, Who
from poolmeter.vendors.proc import PROC


def build(settings: AttributionSection, own: OwnAllocations, proc: Path = PROC) -> Who:
    """Every source, in the configured order of trust. Nothing is asked before the first tick."""
    users = UserNames()
    namespaces = TenantRule(_patterns(settings.namespaces), settings.kubernetes_tenant)
    sources: dict[str, Attribution] = {
        "allocations": Allocations(own),
        "kubernetes": Kubernetes(
            KubernetesSettings(
                Use(settings.kubernetes),
                settings.kubelet_socket,
                settings.kubernetes_logs,
                settings.kubernetes_resources,
                namespaces,
                settings.interval_s,
                settings.timeout_s,
            )
        ),
        "slurm": Slurm(
            Use(settings.slurm),
            settings.slurm_jobs,
            TenantRule(_patterns(settings.slurm_users), settings.slurm_tenant),
            users,
            settings.interval_s,
            settings.timeout_s,
        ),
        "systemd": Units(TenantRule(_patterns(settings.units))),
        "user": Users(TenantRule(_patterns(settings.users), settings.user_tenant), users),
    }
    for name, use, socket in (
        ("docker", settings.docker, settings.docker_socket),
        ("podman", settings.podman, settings.podman_socket),
        ("containerd", settings.containerd, settings.containerd_socket),
    ):
        sources[name] = Runtime(
            RuntimeSettings(
                name,
                Use(use),
                socket,
                settings.tenant_label,
                namespaces,
                settings.rootless,
                interval_s=settings.interval_s,
                timeout_s=settings.timeout_s,
            )
        )
    return Who([sources[name] for name in settings.order], proc)


def _patterns(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(parse_pattern(text) for text in texts)
