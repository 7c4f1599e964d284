"""The tables of docs/migration.md: our side has flags of `kvrouter serve`, or says why not."""

import re

import pytest
from tests.docs.pages import DOCS, rows

from kvrouter.app.settings import RouterSettings
from kvrouter.options.option import options
from kvrouter.options.other_routers import instead_of_flag, instead_of_value, tables

FLAG = re.compile(r"`(--[a-z-]+)`")
SERVE = {flag for option in options(RouterSettings) for flag in option.flags} | {"--config"}
MARKED = re.compile(r"<!-- flags of others -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)
TABLE = [row for row in rows(DOCS / "migration.md") if "`" in row[0]]


def ours(row: list[str]) -> str:
    """The cell about kvrouter: the one before the note."""
    return row[-2]


def test_the_page_has_the_tables_of_the_messages() -> None:
    how = "copy the tables of router/kvrouter/options/other_routers.md between the marks"
    assert MARKED.findall((DOCS / "migration.md").read_text()) == tables(), how
    assert len(TABLE) > 50


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0][:50])
def test_a_command_line_with_a_flag_of_a_row_gets_its_answer(row: list[str]) -> None:
    flag = ""
    for code in re.findall(r"`([^`]+)`", row[0]):
        if code.startswith("--"):
            flag, _, value = code.partition(" ")
        else:
            value = code
        if not flag:  # a variable
            continue
        told = instead_of_flag(flag, value, SERVE) or instead_of_value(flag, value, SERVE)
        for ours_ in FLAG.findall(ours(row)):
            assert ours_ in told or flag in SERVE or flag == "--service-discovery"
        assert told.startswith("use --" if FLAG.findall(ours(row)) else "leave it out: ")
        assert not set("`*[]") & set(told)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0][:50])
def test_a_flag_leads_to_ours_or_says_why_there_is_none(row: list[str]) -> None:
    flags = FLAG.findall(ours(row))
    assert set(flags) <= SERVE
    assert flags or (ours(row) == "none" and row[-1])


@pytest.mark.parametrize(
    "flag",
    [
        "--queue-size",
        "--queue-timeout-secs",
        "--max-concurrent-requests",
        "--request-timeout-secs",
        "--cb-failure-threshold",
        "--cb-timeout-duration-secs",
        "--health-failure-threshold",
        "--health-check-timeout-secs",
        "--health-check-interval-secs",
        "--intra-node-data-parallel-size",
        "--log-level",
    ],
)
def test_a_flag_without_a_row_is_taken_as_it_is(flag: str) -> None:
    assert flag in SERVE
