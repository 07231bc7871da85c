"""The register of devices through a collector's API: the same as in the books, and who may do what."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from collector_served import client, collector, serving, token_of

from poolmeter.accounting.assets.asset_store import PATH, ApiAssets
from poolmeter.books.assets import Entered
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import Role
from poolmeter.errors import BadInput, Refused


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ApiState]:
    with collector(tmp_path) as made:
        yield made


def test_the_commands_write_through_the_api_what_the_books_then_hold(state: ApiState) -> None:
    token = token_of(state, Role.FINANCE, name="fin")
    with serving(create_app(state)) as url:
        store = ApiAssets(url, token)
        rows = [{"uuid": "GPU-1", "owner": "vision", "price": "10.50", "currency": "EUR", "life_months": 36}]
        assert store.enter(rows, "ann", "why", dry_run=True) == Entered(("GPU-1",), (), ())
        assert store.list() == []
        assert store.enter(rows, "ann", "why") == Entered(("GPU-1",), (), ())
        assert store.enter(rows, "ann", "why") == Entered((), (), ("GPU-1",))
        assert store.list() == state.books.assets.list()
        with pytest.raises(BadInput, match="asset GPU-2: price is 'NaN', expected a decimal"):
            store.enter([{"uuid": "GPU-3"}, {"uuid": "GPU-2", "price": "NaN", "currency": "EUR"}], "ann", "why")
        operator = ApiAssets(url, token_of(state, Role.OPERATOR))
        with pytest.raises(Refused):
            operator.enter(rows, "bob", "why")
        with pytest.raises(Refused):
            ApiAssets(url, token_of(state, Role.TENANT)).list()
        assert operator.list() == store.list()
    (change,) = state.books.changes("assets")
    assert (change.by, change.reason, change.key) == ("ann (fin)", "why", "GPU-1")


@pytest.mark.parametrize("body", [{}, {"assets": {}}, {"assets": [1]}, {"assets": [], "dry_run": 1}, {"assets": [{"uuid": "G"}]}])
async def test_a_body_that_cannot_be_is_refused(state: ApiState, body: object) -> None:
    async with client(state) as http:
        assert (await http.post(PATH, json=body)).status_code == 400
    assert state.books.assets.list() == []
