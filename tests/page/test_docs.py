"""docs/status.md tells of every member of the document."""

import re
from pathlib import Path

import msgspec

from kvrouter.control.page import model

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "status.md"


def test_every_member_of_the_document_is_told_of() -> None:
    told = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    structs = [
        s for s in vars(model).values() if isinstance(s, type) and issubclass(s, msgspec.Struct)
    ]
    members = {field.name for struct in structs for field in msgspec.structs.fields(struct)}
    assert len(structs) > 5
    assert members <= told, members - told
