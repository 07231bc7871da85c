"""The documents are true of the tree: dependencies have reasons, links lead somewhere, folders and commands named exist."""

import re
import tomllib
from pathlib import Path

import pytest

from poolmeter.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [project["project"]["dependencies"], project["build-system"]["requires"], *project["project"]["optional-dependencies"].values()]
    return {re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0].lower() for lines in lists for line in lines}


def test_every_dependency_has_a_reason_and_no_other() -> None:
    text = (ROOT / "docs" / "decisions" / "dependencies.md").read_text()
    explained = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    assert {name for name, _ in explained} == declared()
    assert all(len(reason) > 10 for _, reason in explained)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_folders_of_the_map_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = re.findall(r"^\| `([a-z/]+/)` \|", text, re.MULTILINE)
    assert len(folders) > 10
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
    components = {link.name for link in (ROOT / "src" / "poolmeter").iterdir() if link.is_symlink()}
    assert {f"{name}/" for name in components} <= set(folders)


def test_commands_named_in_the_readme_are_built() -> None:
    built = {entry.words for entry in COMMANDS if entry.target is not None}
    named = re.findall(r"poolmeter ([a-z]+)\b", (ROOT / "README.md").read_text())
    assert named
    words = {word for entry in built for word in (entry, entry.split()[0])}
    assert [name for name in named if name not in words and name != "tells"] == []  # "poolmeter tells" is a sentence
