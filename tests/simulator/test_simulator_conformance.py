"""The simulated libraries answer a thousand small questions as a real card did.

goldens/h200_580.json is what the program in conformance/ printed on that card; run it there again to renew it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import MakeMachine

HERE = Path(__file__).parent


def _answers(machine: Any) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "conformance")], env=machine.environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("golden", sorted((HERE / "goldens").glob("*.json")), ids=lambda path: path.stem)
def test_answers_are_those_of_the_card(make_machine: MakeMachine, golden: Path) -> None:
    recorded = json.loads(golden.read_text())
    answers = _answers(make_machine("h200x4"))
    different = {
        f"{group}: {question}": (card, answers.get(group, {}).get(question, "not asked"))
        for group, questions in recorded["answers"].items()
        for question, card in questions.items()
        if answers.get(group, {}).get(question, "not asked") != card
    }
    assert different == {}
    assert sum(map(len, recorded["answers"].values())) > 1000
