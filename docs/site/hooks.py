"""What MkDocs does not do by itself to make a site of these pages.

The index, docs/README.md, is the navigation and the source of llms.txt. Files of the repository
that pages link to, such as ARCHITECTURE.md, become pages or downloads of the site.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
INDEX: Final = "docs/README.md"
OUTSIDE: Final = "repository/"
"""Where the site has the files of the repository that are not in docs/."""
FENCE: Final = re.compile(r"^```(\w+) [^\n]*$", re.MULTILINE)
FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]+)?\)")
ENTRY: Final = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\): (.+(?:\n  .+)*)", re.MULTILINE)
SECTION: Final = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)


class Entry(NamedTuple):
    """A page in the index; `place` is its path in the site's sources."""

    title: str
    place: str
    summary: str


def target(link: str, source: str) -> str:
    """The file of the repository that a link in another one means."""
    return normpath(join(dirname(source), link))


def place(path: str) -> str:
    """Where the site's sources have a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def origin(src_uri: str) -> str:
    """The file of the repository that the site's sources have there."""
    return src_uri.removeprefix(OUTSIDE) if src_uri.startswith(OUTSIDE) else f"docs/{src_uri}"


def index() -> Iterator[tuple[str, list[Entry]]]:
    """Sections of the index, with their pages in order."""
    for title, body in SECTION.findall((ROOT / INDEX).read_text()):
        yield (
            title,
            [
                Entry(name, place(target(link, INDEX)), re.sub(r"\s+", " ", plain(summary)))
                for name, link, summary in ENTRY.findall(body)
            ],
        )


def plain(text: str) -> str:
    """Markdown as text: the words of its links alone."""
    return LINK.sub(lambda match: match[1], text)


def links(path: str) -> set[str]:
    """Files of the repository to which one of its pages links."""
    text = FENCED.sub("", (ROOT / path).read_text())
    found = {target(match[2], path) for match in LINK.finditer(text)}
    return {each for each in found if (ROOT / each).is_file()}


def on_startup(command: str, dirty: bool) -> None:
    """Leave warnings alone in the output; MkDocs counts them, which its flag --quiet prevents."""
    del command, dirty
    logging.getLogger("mkdocs").setLevel(logging.WARNING)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the index."""
    pages: list[dict[str, Any]] = [
        {title: [{each.title: each.place} for each in entries]} for title, entries in index()
    ]
    config.nav = [{"Overview": place(INDEX)}, *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/, and what these link to."""
    new = [origin(each.src_uri) for each in files.documentation_pages()]
    while new:
        path = new.pop()
        for each in sorted(links(path) if path.endswith(".md") else ()):
            if not each.startswith("docs/") and files.get_file_from_path(place(each)) is None:
                files.append(File.generated(config, place(each), abs_src_path=str(ROOT / each)))
                new.append(each)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links lead to where the site has the files, and fences name their language alone."""
    del config, files
    source = origin(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        there = target(match[2], source)
        if (ROOT / there).is_dir():
            return match[1]
        return f"[{match[1]}]({relpath(place(there), dirname(page.file.src_uri))}{match[3] or ''})"

    return LINK.sub(moved, FENCE.sub(r"```\1", markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt and the pages as Markdown, for programs that read; print what was built."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    count = 0
    for title, entries in index():
        lines += ["", f"## {title}", ""]
        for each in entries:
            lines.append(f"- [{each.title}]({each.place}): {each.summary}")
            copy = site / each.place
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text((ROOT / origin(each.place)).read_text())
            count += 1
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    print(f"docs: {count + 1} pages and llms.txt in {os.path.relpath(site)}")
