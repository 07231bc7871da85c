"""Machine files: what they may say, and the sentence for what they may not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.errors import BadInput
from poolmeter.simulator.configuration import load_machine, parse_machine


@pytest.mark.parametrize(
    ("name", "cards", "model"), [("h200x4", 4, "NVIDIA H200"), ("a100x8", 8, "NVIDIA A100-SXM4-80GB"), ("t4x2", 2, "Tesla T4")]
)
def test_known_machines(name: str, cards: int, model: str) -> None:
    machine = load_machine(name)
    assert len(machine.cards) == cards
    assert {card.name for card in machine.cards} == {model}
    assert len({card.uuid for card in machine.cards}) == cards
    assert len({card.bus_id for card in machine.cards}) == cards
    assert len({card.serial for card in machine.cards}) == cards


def test_sizes_and_units() -> None:
    card = load_machine("h200x4").cards[0]
    assert card.memory == 141 * 2**30
    assert card.slice_ns == 2_000_000
    assert card.idle_mw == 75_000
    assert card.h2d_bps == 55 * 10**9


def test_derived_identity_is_stable_and_by_machine_name() -> None:
    text = '[machine]\nname = "{}"\n[[card]]\n'
    assert parse_machine(text.format("a"), "x").cards == parse_machine(text.format("a"), "y").cards
    assert parse_machine(text.format("a"), "x").cards[0].uuid != parse_machine(text.format("b"), "x").cards[0].uuid


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no card"),
        ("[[card]]\nmemory = 3\n", "card 0.memory is 3, expected a text"),
        ('[[card]]\nmemory = "x"\n', "card 0.memory"),
        ("[[card]]\ncolour = 3\n", "unknown key colour"),
        ("[machine]\nclock = 'sun'\n[[card]]\n", "machine.clock is 'sun'"),
        ("[[card]]\ncount = 99\n", "card.count is 99"),
        ("[[card]]\ncount = 2\nserial = '1'\n", "only one card can have"),
        ("[[card]]\nuuid = 'GPU-1'\n", "card 0.uuid is 'GPU-1'"),
        ("[[card]]\nmemory = '512M'\n", "card 0.memory is 536870912 bytes"),
        ("[[card]]\nactive_watts = 1\n", "active_watts is 1"),
        ("[[card]]\ncompute_capability = '9'\n", "compute_capability is '9'"),
        ("[[card]]\nsms = -1\n", "sms is -1, expected 0 or more"),
        ("[[card]]\n[[fault]]\nafter = 1\n", "no call"),
        ("[[card]]\n[garden]\n", "unknown table garden"),
        ("][", "is not TOML"),
        ("[[card]]\n" * 17, "describes 17 cards"),
    ],
)
def test_bad_machine_files_are_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_machine(text, "m.toml")
    assert words in str(caught.value)
    assert "m.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadInput, match="a100x8, h200x4"):
        load_machine("h300x9")


@given(st.text(max_size=200))
def test_any_text_gives_a_machine_or_a_sentence(text: str) -> None:
    try:
        parse_machine(text, "m.toml")
    except BadInput as error:
        assert "m.toml" in str(error)
