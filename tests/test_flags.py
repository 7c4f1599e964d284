"""No flag without an effect: each setting is read where it acts, and a test gives it a value."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvrouter.cli.main import COMMANDS, Command, imported
from kvrouter.options.option import Option, options

ROOT = Path(__file__).resolve().parent.parent
SPELLINGS = [
    re.compile(pattern)
    for pattern in (
        r"\b(\w+)\s?[=:]",
        r"[\"'](\w+)[\"']",
        r"\b[A-Z][A-Z0-9_]+\b",
        r"--[a-z0-9][a-z0-9-]*",
    )
]
ABOUT_PARSING = {"test_command_line.py", "test_config_command.py", "test_flags.py", "test_docs.py"}


def settings() -> list[tuple[Command, Option]]:
    return [(command, each) for command in COMMANDS for each in options(imported(command.settings))]


@cache
def read_names() -> frozenset[str]:
    """Attributes that are read anywhere in the product, by name."""
    names = set()
    for folder in ("router", "store"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
    return frozenset(names)


@cache
def given_by_tests() -> frozenset[str]:
    """Keywords, keys, variables and flags in tests and the programs that they run.

    But for those about parsing.
    """
    found = set[str]()
    for folder in ("tests", "benchmarks", "deploy", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".sh", ".yml", ".yaml"} and path.name not in ABOUT_PARSING:
                text = path.read_text(encoding="utf-8")
                found.update(name for pattern in SPELLINGS for name in pattern.findall(text))
    return frozenset(found)


def spellings(option: Option) -> set[str]:
    """All ways to give it: keyword or key, variable, flag."""
    off = {f"--no-{flag.removeprefix('--')}" for flag in option.flags}
    return {option.name, option.env, *option.flags, *off}


@pytest.mark.parametrize(
    ("command", "option"),
    settings(),
    ids=lambda each: each.name.replace(" ", "-") if hasattr(each, "name") else "",
)
def test_every_setting_is_read_and_given_a_value_by_a_test(
    command: Command, option: Option
) -> None:
    assert option.name in read_names(), f"kvrouter {command.name}: nobody reads {option.name}"
    assert spellings(option) & given_by_tests(), f"no test gives {option.flags[0]} a value"
