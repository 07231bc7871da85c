"""Parsing what sources of discovery say: one spelling of a URL, every wrong answer one sentence, every answer bounded."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.collector.discovery.files import Files, parse_file_sd, parse_node_file
from poolmeter.collector.discovery.targets import parse_groups, parse_json, parse_yaml, target_url
from poolmeter.errors import DataError


@pytest.mark.parametrize(
    ("target", "port", "url"),
    [
        ("10.0.0.1:9877", None, "http://10.0.0.1:9877"),
        ("Node-1.Example.org:9877", None, "http://node-1.example.org:9877"),
        ("node1", 9877, "http://node1:9877"),
        ("http://node1:9877/", None, "http://node1:9877"),
        ("HTTPS://node1/gpu/", None, "https://node1:443/gpu"),
        ("http://node1", None, "http://node1:80"),
        ("[2001:db8::1]:9877", None, "http://[2001:db8::1]:9877"),
    ],
)
def test_a_target_has_one_spelling(target: str, port: int | None, url: str) -> None:
    assert target_url(target, "http", port) == url == target_url(url, "https")


@pytest.mark.parametrize(
    "target",
    [
        "", " ", "node1", "node1:0", "node1:99999", "node1:x", "a b:1", "ftp://x:1", "http://u:p@x:1", "http://x:1/?a=b", "x:1#f", "x:1\n",
        "http://:1", "-x-:1", "ä:1", "x" * 301 + ":1", "[::1:1", "[zz]:1", 7, None, ["x:1"], {"x": 1}, True, "http://x:1?", "//x:1", "x:1@y:2",
    ],
)  # fmt: skip
def test_what_is_no_target_is_named(target: object) -> None:
    with pytest.raises(DataError, match=r"target is .*, expected"):
        target_url(target, "http")


@given(st.one_of(st.text(max_size=40), st.integers(), st.none(), st.binary(max_size=5)))
def test_any_target_is_a_url_of_one_spelling_or_one_sentence(target: object) -> None:
    try:
        url = target_url(target, "http", 9877)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert target_url(url, "http") == url and url.isascii() and "@" not in url


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["a:1", "b:2", "http://c:3"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["targets", "labels", "__scheme__", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_value_is_targets_or_one_sentence(value: object) -> None:
    try:
        found = parse_groups(value, "http", 3)
    except DataError as error:
        assert "expected" in str(error)
    else:
        assert len(found) <= 3 and isinstance(value, list)


@given(st.binary(max_size=200))
def test_any_bytes_are_urls_or_one_sentence(body: bytes) -> None:
    for parse, name in ((parse_node_file, "a.txt"), (parse_node_file, "a.toml"), (parse_file_sd, "a.json"), (parse_file_sd, "a.yml")):
        try:
            assert len(parse(body, name, "http", 5)) <= 5
        except DataError as error:
            assert "\n" not in str(error)


def test_labels_say_where_and_nothing_else() -> None:
    groups = [
        {"targets": ["a:1", "a:1", "A:1"], "labels": {"pool": "gold", "__scheme__": "https", "tenant": "t"}},
        {"targets": ["b:2"], "labels": None},
        {"targets": []},
    ]
    assert parse_groups(groups, "http", 10) == {"https://a:1", "http://b:2"}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"targets": []}, "is an object, expected a list of target groups"),
        (None, "is nothing, expected a list"),
        ([["a:1"]], "a target group is a list, expected an object"),
        ([{"targets": "a:1"}], "targets of a group are text, expected a list"),
        ([{"targets": ["a:1"], "labels": []}], "labels of a group are a list"),
        ([{"targets": ["a:1"], "labels": {"__scheme__": "file"}}], "__scheme__ is 'file'"),
        ([{"targets": ["a:1"], "target": []}], "has 'target', expected targets and labels alone"),
        ([{"targets": [f"h{n}:1" for n in range(11)]}], "more than 10 targets"),
    ],
)
def test_wrong_groups_are_named(value: object, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        parse_groups(value, "http", 10)


def test_deep_and_multiplying_documents_end_in_one_sentence() -> None:
    for parse in (parse_json, parse_yaml):
        with pytest.raises(DataError):
            parse_groups(parse(b"[" * 100_000 + b"]" * 100_000), "http", 10)
    laughs = b"a: &a [x:1, x:1]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 120))
    with pytest.raises(DataError):
        parse_groups(parse_yaml(laughs), "http", 10)
    many = b"- &g {targets: [a:1]}\n" + b"- *g\n" * 50_000
    assert parse_groups(parse_yaml(many), "http", 10) == {"http://a:1"}


NO_SESSION: Any = None  # files need none


async def asked(files: Files) -> tuple[set[str], str | None]:
    answer = await files.ask(NO_SESSION)
    return set(answer.urls), answer.trouble


def old(path: Path, text: str) -> None:
    """Written long ago."""
    path.write_text(text)
    os.utime(path, (1_700_000_000 + len(text), 1_700_000_000 + len(text)))


async def test_lines_and_toml(tmp_path: Path) -> None:
    lines, toml = tmp_path / "nodes.txt", tmp_path / "nodes.toml"
    old(lines, "# ours\nhttp://a:1/\n\n  b:2  # the second\n")
    old(toml, 'nodes = ["c:3", "http://a:1"]\n')
    assert await asked(Files("file", [str(lines)], parse_node_file, "http", 10)) == ({"http://a:1", "http://b:2"}, None)
    assert await asked(Files("file", [str(toml)], parse_node_file, "https", 10)) == ({"https://c:3", "http://a:1"}, None)


@pytest.mark.parametrize("text", ["", "http://a:1\nnonsense\n", "a:1\x00\n"])
async def test_a_file_that_turns_bad_keeps_what_it_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.txt"
    old(path, "a:1\nb:2")
    files = Files("file", [str(path)], parse_node_file, "http", 10)
    assert await asked(files) == ({"http://a:1", "http://b:2"}, None)
    old(path, text)
    for _ in range(2):
        urls, trouble = await asked(files)
        assert urls == {"http://a:1", "http://b:2"} and trouble is not None and str(path) in trouble
    path.unlink()
    urls, trouble = await asked(files)
    assert urls == {"http://a:1", "http://b:2"} and "No such file" in (trouble or "")
    old(path, "# nobody\n")
    assert await asked(files) == (set(), None)


async def test_a_file_that_was_never_good_fails(tmp_path: Path) -> None:
    for path, body in ((tmp_path / "none.txt", None), (tmp_path / "x.json", "[{"), (tmp_path / "y.toml", "nodes = 3")):
        if body is not None:
            old(path, body)
        parse = parse_file_sd if path.suffix == ".json" else parse_node_file
        with pytest.raises(DataError, match=path.name):
            await Files("file", [str(path)], parse, "http", 10).ask(NO_SESSION)


async def test_file_sd_of_many_files_loses_nobody_by_one_that_is_half_written(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.yml"
    old(one, json.dumps([{"targets": ["a:1"], "labels": {"pool": "x"}}]))
    old(two, "- targets: ['b:2', 'c:3']\n")
    files = Files("file_sd", [str(tmp_path / "*.json"), str(tmp_path / "*.yml")], parse_file_sd, "http", 10)
    assert await asked(files) == ({"http://a:1", "http://b:2", "http://c:3"}, None)
    # Half of it is a document too: it is not read while it is being written, but at the first look at which it stands still.
    two.write_text("- targets: ['b:2'")
    assert await asked(files) == ({"http://a:1", "http://b:2", "http://c:3"}, None)
    two.write_text("- targets: ['b:2']\n")
    assert await asked(files) == ({"http://a:1", "http://b:2", "http://c:3"}, None)
    assert await asked(files) == ({"http://a:1", "http://b:2"}, None)
    old(one, '[{"targets": ["a:1"')
    urls, trouble = await asked(files)
    assert urls == {"http://a:1", "http://b:2"} and "one.json is not JSON" in (trouble or "")
    one.unlink()
    assert await asked(files) == ({"http://b:2"}, None)
    files = Files("file_sd", [str(tmp_path / "nowhere" / "*.json")], parse_file_sd, "http", 10)
    with pytest.raises(DataError, match="nowhere cannot be listed"):
        await files.ask(NO_SESSION)


async def test_a_file_too_large_a_pipe_and_too_many_targets_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    large, many = tmp_path / "large.txt", tmp_path / "many.txt"
    old(large, "#" * ((4 << 20) + 1))
    old(many, "\n".join(f"h{n}:1" for n in range(11)))
    for path, reason in ((tmp_path / "pipe", "pipe"), (large, "more than 4194304 bytes"), (many, "more than 10 targets")):
        with pytest.raises(DataError, match=reason):
            files = Files("file", [str(path)], parse_node_file, "http", 10)
            for _ in range(3):
                await files.ask(NO_SESSION)
