"""The pages as a site: `make docs` builds it without a warning, and it needs no other host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, ROOT

PYTHON = os.environ.get("KVROUTER_MKDOCS_PYTHON", sys.executable)
"""One with docs/site/requirements.txt; .ci/stages/lint.sh makes it."""
SITE = ROOT / "build/site"
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?([^\"\s>]+)")
IMPORTED = re.compile(r"url\(\"?(https?:[^)\"]+)|@import")


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the build printed."""
    found = subprocess.run([PYTHON, "-c", "import material"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("no MkDocs: pip install -r docs/site/requirements.txt")
    done = subprocess.run(
        ["make", "docs", f"PYTHON={PYTHON}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines()


def test_the_build_warns_of_nothing_and_sums_up(said: list[str]) -> None:
    assert [line for line in said if not line.startswith("docs: ")] == []
    assert int(re.findall(r"^docs: (\d+) pages", said[-1])[0]) >= len(list(DOCS.glob("*.md")))


@pytest.mark.usefixtures("said")
def test_no_page_loads_anything_from_another_host() -> None:
    pages = list(SITE.rglob("*.html"))
    loaded = {each for page in pages for each in LOADED.findall(page.read_text())}
    styles = {each for css in SITE.rglob("*.css") for each in IMPORTED.findall(css.read_text())}
    assert len(pages) > 50
    assert {each for each in loaded if each.startswith(("http:", "https:", "//"))} == set()
    assert styles == set()


@pytest.mark.usefixtures("said")
def test_llms_txt_leads_to_every_page_as_markdown_with_a_summary() -> None:
    text = (SITE / "llms.txt").read_text()
    entries = re.findall(r"^- \[.+\]\((.+)\): (.+)$", text, re.MULTILINE)
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert {target for target, _ in entries if "/" not in target} == pages
    assert all(len(summary) > 10 for _, summary in entries)
    assert [target for target, _ in entries if not (SITE / target).is_file()] == []


@pytest.mark.usefixtures("said")
def test_a_page_of_the_repository_is_part_of_the_site() -> None:
    page = (SITE / "repository/ARCHITECTURE.html").read_text()
    assert 'href="../install.html#which-files-belong-to-which-distribution"' in page
    assert (
        Path(SITE / "repository/deploy/nginx.conf").read_text()
        == (ROOT / "deploy/nginx.conf").read_text()
    )
