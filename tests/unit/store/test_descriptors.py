"""The limit of open files, in processes of their own: a hard limit never rises again."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from kvrouter_store import descriptors
print(descriptors.raise_limit())
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(descriptors.connections({most}, 2))
print(descriptors.lack({most}, 2))
"""


def told(soft: int, hard: int, most: int) -> list[str]:
    code = CODE.format(soft=soft, hard=hard, most=most)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_the_soft_limit_becomes_the_hard_one_and_a_line_says_so() -> None:
    line, limit, allowed, lack = told(512, 2048, 500)
    assert line == "open files: at most 2048 (the soft limit was 512)"
    assert (limit, allowed, lack) == ("2048", "500", "")


def test_a_limit_that_is_high_already_stays() -> None:
    assert told(1024, 1024, 10)[:2] == ["open files: at most 1024", "1024"]


@pytest.mark.parametrize(("hard", "allowed"), [(1024, "384"), (300, "22"), (100, "1")])
def test_a_low_hard_limit_leaves_descriptors_for_what_is_no_client(hard: int, allowed: str) -> None:
    _, _, found, lack = told(100, hard, 16384)
    assert found == allowed
    assert f"allows {allowed} of 16384 connections" in lack
    assert "raise it to 33024" in lack
