"""Configuration: every fault is one sentence with file and key."""

import pytest

from poolmeter.config import load_config, parse_config
from poolmeter.errors import BadInput


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = [", "not TOML"),
        ("[exporter]\nport = 99999", "exporter.port"),
        ("[exporter]\nprot = 1", "exporter.prot is not a known key"),
        ("[frob]\n", "frob is not a known key"),
        ("[enforcer]\ncompute_over_commit = 0.5", "enforcer.compute_over_commit"),
        ("[enforcer]\ncompute_over_commit = nan", "enforcer.compute_over_commit"),
        ("[node]\nname = 'a b'", "node.name"),
        ("[collector]\nnodes = 3", "collector.nodes"),
        ("[collector]\nnodes = ['ftp://a']", "collector.nodes"),
        ("[collector]\nnodes = ['http://']", "collector.nodes"),
        ("[collector]\nnodes = ['http://a:99999']", "collector.nodes"),
        ("[collector]\nnodes = ['http://a:9877', 'http://a:9877']", "collector.nodes"),
        ("[collector]\nname = ''", "collector.name"),
        ("[collector]\nbooks = 'books.sqlite'", "collector.books .*, expected: are 'books.sqlite', expected a file or a URL"),
        ("[collector]\nbooks = 'mysql://db/books'", "collector.books"),
        ("[enforcer]\ncollector = 'nowhere'", "enforcer.collector"),
        ("[accounting]\ntime_zone = 'Mars/Olympus'", "accounting.time_zone"),
        ('[node]\npool = "a\\u001b[31m"', "node.pool"),
        ("[exporter]\nport = true", "exporter.port"),
        ("[exporter]\nport = '9877'", "exporter.port"),
        ("[exporter]\nconsumers = []", "exporter.consumers"),
        ("[recommend]\nexpires_hours = 99999999999999999999", "recommend.expires_hours"),
        ("[attribution]\norder = ['user']", "attribution.order is .*, expected: each of allocations, slurm, kubernetes"),
        ("[attribution]\nkubernetes = 'yes'", "attribution.kubernetes"),
        ("[attribution]\nkubernetes_tenant = '{account}'", "attribution.kubernetes_tenant .* namespace, pod, container"),
        ("[attribution]\nslurm_tenant = '{user'", "attribution.slurm_tenant"),
        ("[attribution]\nnamespaces = ['team-a']", "attribution.namespaces.0 .*, expected: a pattern and a tenant"),
        ("[attribution]\nusers = ['=x']", "attribution.users.0"),
        ("[attribution]\ntimeout_s = 0", "attribution.timeout_s"),
        ("[attribution]\nrootless = true", "attribution.rootless"),
        ("[attribution]\nkubernetes_resources = []", "attribution.kubernetes_resources"),
        ("x = " + "[" * 5000, "nested too deeply"),
        ("x = " + "9" * 6000, "not TOML"),
    ],
)
def test_faults_are_named(text: str, named: str) -> None:
    with pytest.raises(BadInput, match=named) as caught:
        parse_config(text.encode(), "some.toml")
    assert "some.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["", "/", "/nowhere.toml", "/dev/zero"])
def test_a_file_that_is_no_file(path: str) -> None:
    with pytest.raises(BadInput, match="configuration file"):
        load_config(path)


@pytest.mark.parametrize(
    "rest", ["//ann:hunter2@db/books", "//db/books?password=hunter2", "//ann:hun@hunter2@db/b", "//db/b?sslpassword=hunter2"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(rest: str) -> None:
    with pytest.raises(
        BadInput, match=r"collector.books is .*, expected: .* a password, expected it in the file that PGPASSFILE"
    ) as caught:
        parse_config(f"[collector]\nbooks = 'postgresql:{rest}'".encode(), "some.toml")
    assert "hunter2" not in str(caught.value)


def test_bytes_that_are_not_text() -> None:
    with pytest.raises(BadInput, match="not TOML"):
        parse_config(b"\xff\xfe", "some.toml")


def test_defaults_are_the_contracts_ports() -> None:
    config = parse_config(b"", "empty.toml")
    assert (config.exporter.port, config.collector.port, config.dashboard.port) == (9877, 9878, 8501)
