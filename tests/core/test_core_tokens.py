"""Token files: made once with mode 0600, read whole or refused, found in one order by everybody."""

import os
from pathlib import Path

import pytest

from poolmeter.errors import BadInput, Unavailable
from poolmeter.tokens import client_token, make_token, own_token_file, read_token


def test_a_folder_gets_one_token_that_only_its_owner_reads(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = make_token(tmp_path / "new" / "data")
    finally:
        os.umask(umask)
    assert path == own_token_file(tmp_path / "new" / "data") and path.stat().st_mode & 0o777 == 0o600
    first = read_token(path)
    assert len(first) >= 32
    assert read_token(make_token(tmp_path / "new" / "data")) == first
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_what_a_killed_maker_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / f".token.{os.getpid()}").write_text("half")
    assert read_token(make_token(tmp_path)) != "half"


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"token file .*/file/token cannot be made: "):
        make_token(tmp_path / "file")


@pytest.mark.parametrize("body", [b"", b"\n \n", b"two words", b"two\nlines", b"\xff\xfe", "é".encode(), b"nul\0", b"x" * 5000])
def test_a_file_that_holds_no_token(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(body)
    with pytest.raises(BadInput, match=r"holds no token, expected one line of ASCII text without spaces$"):
        read_token(path)


def test_a_file_that_is_absent_or_a_folder(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory"), (tmp_path / "a\0b", "embedded null byte")):
        with pytest.raises(BadInput, match=f"cannot be read: {why}"):
            read_token(path)


def test_clients_look_in_one_order(tmp_path: Path) -> None:
    assert client_token(None, tmp_path) is None
    own = read_token(make_token(tmp_path))
    assert client_token(None, tmp_path) == own
    (tmp_path / "configured").write_text("configured\n")
    assert client_token(tmp_path / "configured", tmp_path) == "configured"
    with pytest.raises(BadInput, match="absent"):
        client_token(tmp_path / "absent", tmp_path)
