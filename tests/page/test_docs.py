"""docs/status.md tells of every member of the document."""

import re
from pathlib import Path

import msgspec

from kvrouter.control.page import model
from kvrouter.control.page.snapshot import SERIES

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "status.md"


def test_every_member_of_the_document_and_every_series_is_told_of() -> None:
    told = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    structs = [
        s for s in vars(model).values() if isinstance(s, type) and issubclass(s, msgspec.Struct)
    ]
    members = {field.name for struct in structs for field in msgspec.structs.fields(struct)}
    assert len(structs) > 10
    assert members | set(SERIES) <= told, (members | set(SERIES)) - told
