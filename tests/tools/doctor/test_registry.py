"""Every check has its own name, stands in the page, and a test plants a fault for it."""

from collections import Counter
from pathlib import Path

from kvrouter.tools.doctor.registry import CHECKS, checks_page

ROOT = Path(__file__).resolve().parents[3]


def test_names_of_checks_are_unique() -> None:
    assert [name for name, times in Counter(c.name for c in CHECKS).items() if times > 1] == []


def test_the_page_of_checks_is_up_to_date() -> None:
    how = "python -m kvrouter.tools.doctor.registry > docs/doctor-checks.md"
    assert (ROOT / "docs/doctor-checks.md").read_text() == checks_page(), how


def test_the_example_of_the_page_names_the_number_of_checks() -> None:
    assert f"{len(CHECKS)} checks" in (ROOT / "docs/doctor.md").read_text()


def test_every_check_is_seen_to_find_something() -> None:
    folder = Path(__file__).parent
    said = "".join(path.read_text() for path in folder.glob("test_*.py"))
    assert [check.name for check in CHECKS if f'"{check.name}"' not in said] == []
