"""The daemon on its socket: who may do what, strict requests, and clients that misbehave."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.enforcer import daemon as daemon_module
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.changes import Owner
from poolmeter.enforcer.client import EnforcerClient
from poolmeter.enforcer.daemon import Daemon
from poolmeter.enforcer.journal import Journal
from poolmeter.enforcer.protocol import MAX_REQUEST, Peer, address_of, decode_request, encode_request, record
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable
from poolmeter.model.allocation import Labels
from poolmeter.model.plain import to_plain
from poolmeter.places import NodeRun

GIB = 1 << 30
SMALL = AllocationRequest(Labels("acme"), compute_ppm=250_000)


@contextlib.contextmanager
def served(book: Book) -> Iterator[EnforcerClient]:
    """The book behind a daemon in a thread of this process."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    daemon = Daemon(book, "alpha")
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            loop.run_until_complete(daemon.serve(stop, ready.set))
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(20)
        if failed:
            raise failed[0]
        yield EnforcerClient(book.run, timeout_s=20)
    finally:
        if not failed:
            loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@pytest.fixture
def client(open_book) -> Iterator[EnforcerClient]:
    with served(open_book()) as client:
        yield client


def test_every_verb_over_the_socket(client: EnforcerClient) -> None:
    assert client.ping()["node"] == "alpha"
    allocation = client.create(SMALL)
    assert allocation.owner_uid == os.geteuid() and allocation.owner_pid is None
    assert client.list() == (allocation,)
    assert client.show(allocation.id)["processes"] == []
    changed, warnings = client.resize(ResizeRequest(allocation.id, memory_bytes=8 * GIB))
    assert (changed.slices[0].memory_bytes, warnings) == (8 * GIB, ())
    assert client.release(allocation.id).id == allocation.id
    assert client.list() == ()


def test_an_owned_allocation_belongs_to_the_process_that_asked(client: EnforcerClient) -> None:
    from dataclasses import replace

    allocation = client.create(replace(SMALL, owned=True))
    assert allocation.owner_pid == os.getpid()


def test_errors_keep_their_kind(client: EnforcerClient) -> None:
    with pytest.raises(Refused, match="is not on this node"):
        client.show("a-0000000000-0123456789ab")
    with pytest.raises(BadInput, match="allocation id"):
        client.release("..")
    with pytest.raises(BadInput, match="tenant is ''"):
        client.create(AllocationRequest(Labels("")))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"\n", "expected a JSON object"),
        (b"[]\n", "expected a JSON object"),
        (b"[" * 60_000 + b"\n", "expected a JSON object"),
        (b'{"verb":"ping"}\n', "expected version, verb and body"),
        (b'{"version":2,"verb":"ping","body":{}}\n', "has version 2, expected 1"),
        (b'{"version":1,"verb":"_answer","body":{}}\n', "expected one of create, list"),
        (b'{"version":1,"verb":"ping","body":[]}\n', "expected an object"),
        (b'{"version":1,"verb":"ping","body":{"x":1}}\n', "expected none"),
        (b'{"version":1,"verb":"show","body":{"id":"a","x":1}}\n', "has the key 'x'"),
        (b'{"version":1,"verb":"show","body":{"id":7}}\n', "expected str"),
        (b'{"version":1,"verb":"create","body":{"labels":{"tenant":"t","tennant":"u"}}}\n', "has the key 'tennant'"),
        (b'{"version":1,"verb":"create","body":{"labels":{"tenant":"t"},"compute_ppm":1e9}}\n', "expected int"),
        (b'{"version":1,"verb":"create","body":{"labels":{"tenant":"t"},"compute_ppm":0}}\n', "expected 1 to 1000000"),
        (b'{"version":1,"verb":"create","body":{"labels":{"tenant":"t"},"devices":["0","0"]}}\n', "different"),
        *(
            (b'{"version":1,"verb":"create","body":{"labels":{"tenant":"t","project":%s}}}\n' % value, told)
            for value, told in (
                (b'"%s"' % (b"x" * 129), "expected 1 to 128 printable characters without outer spaces"),
                (b'""', "project is ''"),
                (b'" x"', "project is ' x'"),
                (b'"a\\nb"', r"project is 'a\nb'"),
                (b'"\\u0000"', r"project is '\x00'"),
                (b'"\\ud800"', r"project is '\ud800'"),  # half a character
                (b'"\\u202e"', r"project is '\u202e'"),  # turns the line round on a terminal
                (b"7", "expected str"),
                (b'["a","b"]', "expected str"),
            )
        ),
    ],
)
def test_a_request_that_is_not_one_is_answered_and_the_next_served(client: EnforcerClient, line: bytes, told: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(client.run.socket))
        file = connection.makefile("rb")
        for _ in range(2):
            connection.sendall(line)
            answer = json.loads(file.readline())
            assert not answer["ok"] and answer["error"]["kind"] == "bad_input"
            assert told in answer["error"]["message"]
        connection.sendall(encode_request("ping", {}))
        assert json.loads(file.readline())["ok"]


@given(st.binary(max_size=200))
def test_no_bytes_make_a_request_raise_anything_else(line: bytes) -> None:
    with contextlib.suppress(BadInput):
        decode_request(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(["labels", "mode", "devices", "compute_ppm", "soft", "weight"]), json_values | st.just({"tenant": "t"}))
)
def test_no_body_makes_a_record_raise_anything_else(body: dict[str, object]) -> None:
    with contextlib.suppress(BadInput):
        record(AllocationRequest, body, "create")


def test_a_request_without_end_is_cut_off(client: EnforcerClient) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(client.run.socket))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"x" * (4 * MAX_REQUEST))
        assert b"longer than" in connection.makefile("rb").readline()


def test_silent_and_half_finished_clients_hold_up_nobody_else(client: EnforcerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = iter([*[4242] * 140, 0])
    monkeypatch.setattr(daemon_module, "peer_of", lambda _: Peer(1, next(uid, 4242), 0))
    monkeypatch.setattr(daemon_module, "_IDLE_S", 3.0)
    with contextlib.ExitStack() as stack:
        for number in range(140):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(client.run.socket))
            if number % 2:
                with contextlib.suppress(BrokenPipeError):
                    connection.sendall(b'{"version":1,')
        assert client.ping()["node"] == "alpha"
        with pytest.raises(Unavailable, match="uid 4242 has 128 connections"):
            client.ping()
        deadline = time.monotonic() + 20
        while True:  # the silent ones are let go in the end
            with contextlib.suppress(Unavailable):
                client.ping()
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_others_change_only_what_they_created(open_book) -> None:
    book = open_book()
    daemon = Daemon(book, "alpha")
    mine = book.create(SMALL, Owner(uid=os.geteuid() + 1000))
    roots = book.create(SMALL, Owner(uid=0))
    stranger, me = Peer(1, os.geteuid() + 4242, 0), Peer(1, os.geteuid() + 1000, 0)
    for peer, target in ((stranger, mine), (stranger, roots), (me, roots)):
        for verb, body in (("_release", {"id": target.id}), ("_resize", {"id": target.id, "compute_ppm": 1}), ("_show", {"id": target.id})):
            with pytest.raises(Refused, match=f"uid {peer.uid} may not"):
                getattr(daemon, verb)(body, peer)
    assert [row["id"] for row in daemon._list({}, me)["rows"]] == [mine.id]
    assert [row["id"] for row in daemon._list({}, Peer(1, 0, 0))["rows"]] == [mine.id, roots.id]
    with pytest.raises(Refused, match="expected uid 0"):
        daemon._create({**to_plain(SMALL), "enforcement": "root"}, me)
    assert daemon._create(to_plain(SMALL), stranger)["allocation"]["owner_uid"] == stranger.uid
    daemon._resize({"id": mine.id, "compute_ppm": 100_000}, me)
    daemon._release({"id": mine.id}, me)
    daemon._release({"id": roots.id}, Peer(1, 0, 0))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_socket_that_is_closed_to_a_user_says_so(make_node) -> None:
    node = make_node("closed")
    for folder in (node.root, *node.root.parents[:3]):
        folder.chmod(0o755)
    node.run.socket.chmod(0o600)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setuid(4242)
            node.client.list()
            os._exit(1)
        except Unavailable as error:
            os._exit(0 if "is closed to this user, expected its owner or root" in str(error) else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_path_too_long_for_a_socket_works_all_the_same(tmp_path: Path, cards) -> None:
    root = tmp_path / ("deep" * 30) / "run"
    book = Book(NodeRun(root), Journal(tmp_path / "events.jsonl"), cards())
    book.open()
    try:
        assert len(str(book.run.socket)) > 107
        with served(book) as client:
            assert client.ping()["node"] == "alpha"
    finally:
        book.close()


def test_a_long_path_without_its_folder_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be opened"), address_of(tmp_path / ("x" * 120) / "enforcer.sock"):
        pass


def test_the_socket_of_a_dead_enforcer_is_replaced_and_a_second_one_refused(make_node) -> None:
    node = make_node("alpha")
    second = node.poolmeter("enforcer", "--run", str(node.run.root))
    assert second.returncode == 3
    assert "has an enforcer already" in second.stderr and second.stderr.count("\n") == 1
    assert node.client.ping()["node"] == "alpha"
    node.kill()
    assert node.run.socket.exists()
    with pytest.raises(Unavailable, match="start one with"):
        node.client.ping()
    node.start()
    assert node.client.ping()["node"] == "alpha"
    assert node.kill(15) == 0
    assert not node.run.socket.exists()


def test_a_driver_that_hangs_holds_up_no_list_and_no_release(open_book) -> None:
    book = open_book()
    allocation = book.create(SMALL, Owner())
    listed, hang = book.inventory.devices(), threading.Event()
    with served(book) as client:
        book.inventory.devices = lambda: hang.wait(20) and listed  # type: ignore[method-assign]
        waiting = [threading.Thread(target=client.create, args=(SMALL,)) for _ in range(12)]
        for thread in waiting:
            thread.start()
        assert client.list() == (allocation,)
        client.release(allocation.id)
        assert not hang.is_set()
        hang.set()
        for thread in waiting:
            thread.join(20)
        assert len(client.list()) == 12


def test_without_a_card_it_does_not_start(make_node) -> None:
    node = make_node("alpha", count=0, start=False)
    done = node.poolmeter("enforcer", "--run", str(node.run.root))
    assert done.returncode == 3
    assert done.stderr == "poolmeter: NVML cannot list the devices of this node: Driver Not Loaded\n"


def test_a_driver_that_hangs_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from poolmeter.enforcer.inventory import NvmlInventory

    (tmp_path / "pynvml.py").write_text("import time\nclass NVMLError(Exception): pass\ndef nvmlInit(): time.sleep(600)\n")
    inventory = NvmlInventory({"PYTHONPATH": str(tmp_path)}, timeout_s=0.5)
    for _ in range(3):  # the second and third are told what the first has found
        with pytest.raises(Unavailable, match=r"within 0.5 s"):
            inventory.devices()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_of_the_machine_creates_and_ends_its_own_over_the_socket(open_book, tmp_path: Path) -> None:
    book = open_book()
    for folder in (tmp_path, *(parent for parent in tmp_path.parents if parent.name.startswith(("pytest-", "popen-")))):
        folder.chmod(0o755)
    with served(book) as client:
        roots = client.create(SMALL)
        script = (
            "import os, sys, json, socket\n"
            "os.setgid(4242); os.setuid(4242)\n"
            "def ask(verb, body):\n"
            "    c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1])\n"
            "    c.sendall(json.dumps({'version': 1, 'verb': verb, 'body': body}).encode() + b'\\n')\n"
            "    return json.loads(c.makefile('rb').readline())\n"
            "made = ask('create', {'labels': {'tenant': 'them'}, 'compute_ppm': 1000})['body']['allocation']\n"
            "print(made['owner_uid'])\n"
            "print(ask('release', {'id': sys.argv[2]})['error']['message'])\n"
            "print(ask('release', {'id': made['id']})['ok'])\n"
        )
        done = subprocess.run([sys.executable, "-c", script, str(client.run.socket), roots.id], capture_output=True, text=True, timeout=30)
        assert done.stderr == ""
        uid, refused, released = done.stdout.splitlines()
        assert (uid, released) == ("4242", "True")
        assert refused.startswith("uid 4242 may not release")


def test_one_error_tree() -> None:
    from poolmeter.enforcer.protocol import decode_answer, encode_error

    for kind in (Refused, BadInput, Unavailable):
        with pytest.raises(kind, match=r"^why$"):
            decode_answer(encode_error(kind("why")))
    with pytest.raises(PoolmeterError):
        decode_answer(b"{}\n")
