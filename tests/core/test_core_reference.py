"""The reference pages say what the code says: every built command with every flag, every setting with its default."""

import importlib.util
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from poolmeter import cli
from poolmeter.config import Config, parse_config

ROOT = Path(__file__).parents[2]
BUILT = [entry for entry in cli.COMMANDS if entry.target is not None]


def commands_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("commands_tool", ROOT / "tools" / "commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sections() -> dict[str, str]:
    """Text of the page by command."""
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    parts = page.split("\n## ")[1:]
    return {part.split("\n", 1)[0].removeprefix("poolmeter "): part for part in parts}


def test_the_page_of_commands_is_what_the_parsers_say() -> None:
    tool = commands_tool()
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run tools/commands.py"


def test_every_built_verb_and_flag_is_documented() -> None:
    found = sections()
    shared = found.pop("Options of every command")
    assert list(found) == [entry.words for entry in BUILT]
    for entry in BUILT:
        for action in cli.parser_of(entry, cli.load(entry))._actions:
            for option in set(action.option_strings) - {"-h", "--help"}:
                assert f"| `{option}" in found[entry.words] + shared, f"{entry.words} {option}"


@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry.words)
def test_examples_are_command_lines(entry: cli.Entry) -> None:
    tool = commands_tool()
    words = shlex.split(tool.EXAMPLES[entry.words])
    assert cli.find(words[1:])[0] == entry and words[0] == "poolmeter"
    cli.parser_of(entry, cli.load(entry)).parse_args(words[1 + len(entry.words.split()) :])


def test_every_setting_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    documented = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in rows]
    expected = []
    for name, section in Config.model_fields.items():
        kind = section.annotation
        assert kind is not None
        for key, setting in kind.model_fields.items():
            default = setting.get_default(call_default_factory=True) if key != "name" or name != "node" else "the host's name"
            expected.append((f"`{name}.{key}`", default))
    assert [key for key, *_ in documented] == [key for key, _ in expected]
    for (key, shown, *_), (_, default) in zip(documented, expected, strict=True):
        if default is None:
            text = "none"
        elif isinstance(default, tuple):
            text = "`[" + ", ".join(f'"{item}"' for item in default) + "]`"
        elif isinstance(default, str) and default != "the host's name":
            text = f'`"{default}"`'
        elif default == "the host's name":
            text = default
        else:
            text = f"`{default}`"
        assert shown == text, key


def test_the_example_of_the_configuration_is_one() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    body = page.split("```toml\n")[1].split("```")[0]
    config = parse_config(body.encode(), "example")
    written = tomllib.loads(body)
    assert config.model_dump(mode="json", include={name: set(keys) for name, keys in written.items()}) == written
