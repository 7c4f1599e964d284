"""Sentences about wrong use, with the remedy, in our own words."""

from __future__ import annotations

from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from kvrouter.options.other_routers import instead_of_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pydantic import ValidationError

    from kvrouter.options.option import Option

_NEAR: Final = 0.6  # similarity (difflib) from which on a name counts as a misspelt other name
_SHOWN: Final = 400  # most characters of a value, and of a remedy, in a message
_REMEDIES: Final = {
    "bool_parsing": "give true or false",
    "bool_type": "give true or false",
    "byte_size": "give a size, as 512MiB",
    "byte_size_unit": "give a size, as 512MiB",
    "extra_forbidden": "there is no such member; correct its name, or leave it out",
    "finite_number": "give a finite number",
    "float_parsing": "give a number",
    "float_type": "give a number",
    "greater_than": "give more than {gt:g}",
    "greater_than_equal": "give at least {ge:g}",
    "int_from_float": "give a whole number",
    "int_parsing": "give a whole number",
    "int_parsing_size": "give a smaller number",
    "int_type": "give a whole number",
    "less_than_equal": "give at most {le:g}",
    "list_type": "give a list",
    "literal_error": "give {expected}",
    "missing": "give a value",
    "model_type": "give an object with members",
    "path_type": "give the path of a file",
    "string_too_short": "give some text",
    "string_unicode": "give text in UTF-8",
    "string_type": "give text; in YAML, put it between quotes",
    "too_long": "give at most {max_length} values",
    "too_short": "give at least {min_length} values",
}
"""What to do, by the type of pydantic's error; its context fills the braces."""


@contextmanager
def about(what: str) -> Iterator[None]:
    """Have the sentence of a ValueError begin with `what`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


class UsageError(Exception):
    """The user must change something; the command ends with exit code 2."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(sentences[0])
        self.sentences = sentences  # all that is wrong; `str` gives the first


def did_you_mean(name: str, names: Collection[str]) -> str:
    """`; did you mean X?`, or nothing if no name begins with `name` or resembles it."""
    near = [each for each in names if each.startswith(name)]
    near = near or get_close_matches(name, names, 1, _NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def complaints(
    error: ValidationError, known: Mapping[str, Option], origins: Mapping[str, str]
) -> Iterator[str]:
    """A sentence for each value that pydantic refused, in the order of `known` settings.

    `origins` names the place of each given value.
    """
    places = {name: place for place, name in enumerate(known)}
    errors = error.errors(include_url=False)
    for each in sorted(errors, key=lambda one: places.get(str([*one["loc"], ""][0]), len(known))):
        yield _complaint(each, known, origins)


def _complaint(error: Any, known: Mapping[str, Option], origins: Mapping[str, str]) -> str:
    cause = error.get("ctx", {}).get("error")  # a ValueError of our own validators
    remedy = str(cause) if cause is not None else _remedy(error)
    option = known.get(str(error["loc"][0])) if error["loc"] else None
    if option is None:
        return remedy
    if error["type"] == "missing":  # its input is all other values, secrets too
        return f"{option.flags[0]}: {remedy}"
    origin = origins.get(option.name, "")
    where = option.flags[0] if origin in ("flag", "") else f"{option.name} ({origin})"
    member = error["loc"][1] if error["type"] == "extra_forbidden" else None
    if member is not None:
        return f"{where}: {_cut(repr(member))}: {remedy}"
    shown = "" if cause is not None or option.secret else f" {_cut(repr(error['input']))}"
    flags = {flag for each in known.values() for flag in each.flags}
    told = instead_of_value(option.flags[0], str(error["input"]), flags)
    return f"{where}{shown}: {_cut(remedy)}{told and f'; {told}'}"


def _remedy(error: Any) -> str:
    text = _REMEDIES.get(error["type"], "this value cannot be used; give another")
    return text.format(**error.get("ctx", {}))


def _cut(text: str) -> str:
    """`text`, or its beginning if it is too long to read."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
