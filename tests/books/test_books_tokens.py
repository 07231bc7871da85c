"""Tokens: shown once, found by their secret alone, for a role, until they end."""

import itertools
from pathlib import Path

import pytest
from books_decisions import NOW
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poolmeter.books.tokens import USED_STEP_US, Role
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.errors import BadInput, Refused


def whose(role: Role) -> dict[str, str]:
    """What a token of that role needs."""
    return {Role.TENANT: {"tenant": "vision"}, Role.NODE: {"node": "n1"}}.get(role, {})


@pytest.mark.parametrize("role", Role)
def test_a_token_is_found_by_its_text_alone(place: Path | str, clock: ManualClock, role: Role) -> None:
    with Books(place, clock) as books:
        token, text = books.tokens.add("mine", role, "ann", **whose(role))
        _, other = books.tokens.add("other", role, "ann", **whose(role))
        assert text.isascii() and " " not in text and text != other
        assert (token.role, token.name, token.created_us, token.expires_us, token.revoked_us, token.last_used_us) == (
            role, "mine", NOW, None, None, None,
        )  # fmt: skip
        assert (token.tenant, token.node) == (whose(role).get("tenant"), whose(role).get("node"))
        assert books.tokens.find(text) == token
        head, ident, secret = text.split("_", 2)
        wrong = [
            "", "_", "__", "pm", f"pm_{ident}", f"pm_{ident}_", f"{head}_{ident}_{secret[:-1]}", f"{text}x", f" {text}", text.upper(),
            f"pm__{secret}", secret, f"pm_{other.split('_')[1]}_{secret}", f"xx_{ident}_{secret}", f"pm_{ident}_\ud800", "\0", "é" * 50,
        ]  # fmt: skip
        assert [books.tokens.find(found) for found in wrong] == [None] * len(wrong)


def test_the_secret_is_nowhere(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "books.sqlite"
    with Books(path, clock) as books:
        _, text = books.tokens.add("mine", Role.ADMIN, "ann", reason="why")
        books.tokens.find(text)
        secret = text.split("_", 2)[2]
        assert secret not in repr(books.tokens.list()) + repr(books.changes())
        found = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert text.split("_")[1].encode() in found
    assert secret.encode() not in found


@given(text=st.text(max_size=100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_other_text_opens_anything(tmp_path: Path, text: str) -> None:
    with Books(tmp_path / "books.sqlite") as books:
        if not books.tokens.list():
            books.tokens.add("mine", Role.ADMIN, "ann")
        assert books.tokens.find(text) is None and books.tokens.find(f"pm_{text}") is None


def test_it_opens_nothing_from_its_end_on(place: Path | str, clock: ManualClock) -> None:
    with Books(place, clock) as books:
        token, text = books.tokens.add("short", Role.FINANCE, "ann", expires_us=NOW + 10)
        clock.advance(9)
        assert books.tokens.find(text) is not None
        clock.advance(1)
        assert books.tokens.find(text) is None
        # Its name is free then.
        again, text = books.tokens.add("short", Role.FINANCE, "ann")
        clock.advance(5)
        revoked = books.tokens.revoke(again.id, "bob", "lost")
        assert revoked.revoked_us == NOW + 15 and books.tokens.find(text) is None
        with pytest.raises(Refused, match=rf"token {again.id} was revoked at {NOW + 15} us"):
            books.tokens.revoke(again.id, "bob")
        assert [(found.id, found.revoked_us) for found in books.tokens.list()] == [(token.id, None), (again.id, NOW + 15)]
        last = books.changes("tokens", again.id)[-1]
        assert (last.by, last.reason, last.before and last.before["revoked_us"], last.after["revoked_us"]) == (
            "bob",
            "lost",
            None,
            NOW + 15,
        )


@pytest.mark.parametrize(("role", "tenant", "node"), list(itertools.product(Role, [None, "vision"], [None, "n1"])))
def test_a_role_has_its_tenant_or_its_node_and_no_other(tmp_path: Path, role: Role, tenant: str | None, node: str | None) -> None:
    with Books(tmp_path / "books.sqlite") as books:
        if (role is Role.TENANT) == (tenant is not None) and (role is Role.NODE) == (node is not None):
            found, _ = books.tokens.add("a", role, "ann", tenant, node)
            assert (found.tenant, found.node) == (tenant, node)
        else:
            with pytest.raises(BadInput, match=f"role of the token is {role.value} and its (tenant|node) .*, expected (a|no) "):
                books.tokens.add("a", role, "ann", tenant, node)
            assert books.tokens.list() == [] and books.changes() == []


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 129, "a\0", "\ud800"])
def test_names_that_nobody_can_read_are_refused(place: Path | str, name: str) -> None:
    with Books(place) as books:
        with pytest.raises(BadInput, match="name of the token"):
            books.tokens.add(name, Role.ADMIN, "ann")
        with pytest.raises(BadInput, match="tenant of the token"):
            books.tokens.add("a", Role.TENANT, "ann", tenant=name)


def test_what_cannot_be_is_refused(place: Path | str, clock: ManualClock) -> None:
    with Books(place, clock) as books:
        books.tokens.add("a", Role.ADMIN, "ann")
        with pytest.raises(Refused, match="token name is 'a', which a valid token has"):
            books.tokens.add("a", Role.FINANCE, "ann")
        with pytest.raises(BadInput, match=rf"end of the token is {NOW} us, expected a time after now"):
            books.tokens.add("b", Role.ADMIN, "ann", expires_us=NOW)
        for unknown in ("none", "", "\0"):
            with pytest.raises(BadInput, match="is not in the books, expected an id of poolmeter token list"):
                books.tokens.revoke(unknown, "ann")
        assert len(books.tokens.list()) == len(books.changes()) == 1


def test_its_last_use_is_known_to_the_minute(place: Path | str, clock: ManualClock) -> None:
    with Books(place, clock) as books:
        _, text = books.tokens.add("a", Role.ADMIN, "ann")
        used = []
        for step in (0, USED_STEP_US - 1, 1, 5):
            clock.advance(step)
            assert books.tokens.find(text) is not None
            used.append(books.tokens.list()[0].last_used_us)
        assert used == [NOW, NOW, NOW + USED_STEP_US, NOW + USED_STEP_US]
        # A use is no change of the books.
        assert len(books.changes()) == 1
