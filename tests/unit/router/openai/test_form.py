"""Forms: what routing reads of them, and those that two parsers could read in two ways."""

import pytest

from kvrouter.errors import ApiError
from kvrouter.openai.form import is_form, read_form
from kvrouter.openai.media import MEDIUM_TOKENS
from kvrouter.serving.request.versions import renamed

KIND = "multipart/form-data; boundary=edge"
NAMED = b'content-disposition: form-data; name="%b"'
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """The form of these parts: head and value."""
    return b"".join(b"--edge\r\n%b\r\n\r\n%b\r\n" % part for part in parts) + b"--edge--\r\n"


def field(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    return NAMED % name, value


def refusal(body: bytes, kind: str = KIND) -> str:
    with pytest.raises(ApiError) as raised:
        read_form(body, kind)
    assert raised.value.status == 400
    return raised.value.message


@pytest.mark.parametrize(
    "kind",
    [
        KIND,
        'Multipart/Form-Data;boundary="edge"',
        "multipart/form-data; boundary=edge; charset=utf-8",
        'multipart/form-data; charset="UTF-8"; boundary=edge',
    ],
)
@pytest.mark.parametrize(
    "head",
    [
        NAMED % b"model",
        b"CONTENT-DISPOSITION:form-data;name=model",
        b'Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="model"',
    ],
)
def test_the_model_is_read_wherever_it_stands(kind: str, head: bytes) -> None:
    audio = FILE, b"RIFF\r\n--edg\r\n\r\n" * 1000
    language = field(b"language", "é".encode())
    for parts in ([(head, b"a/b"), audio, language], [audio, language, (head, b"a/b")]):
        body = form(*parts)
        request = read_form(body, kind)
        assert (request.model, request.body, request.stream) == ("a/b", body, False)
        assert request.form == kind.encode()
        assert MEDIUM_TOKENS <= request.prompt_tokens < MEDIUM_TOKENS + 10
    assert is_form(kind)


@pytest.mark.parametrize(
    ("value", "stream"), [(b"true", True), (b"1", True), (b"False", False), (b"x", False)]
)
def test_a_stream_is_asked_for_as_engines_read_it(value: bytes, stream: bool) -> None:
    assert read_form(form(field(b"stream", value)), KIND).stream is stream


@pytest.mark.parametrize("parts", [[], [field(b"model", b"")], [(FILE, b"")]])
def test_a_form_may_name_no_model(parts: list[tuple[bytes, bytes]]) -> None:
    assert read_form(form(*parts) if parts else b"--edge--", KIND).model is None


@pytest.mark.parametrize(
    "head",
    [
        b'content-disposition: form-data; name="model"; name="user"',
        b'content-disposition: form-data; name="user"; name="model"',
        b"content-disposition: form-data; name*=utf-8''model",
        b'content-disposition: form-data; name*0="mo"; name*1="del"',
        b'content-disposition: form-data; name="mo\\del"',
        b'content-disposition: form-data; filename="a"; name="model"',
        b'content-disposition : form-data; name="model"',
        b'content-disposition: form-data;\r\n name="model"',
        b'content-disposition: attachment; name="model"',
        NAMED % b"user" + b"\r\n" + NAMED % b"model",
        b"x: y",
        b"",
    ],
)
def test_a_name_that_is_not_clear_is_refused(head: bytes) -> None:
    assert "not a form that can be served" in refusal(form((head, b"a"), (FILE, b"")))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"\r\n" + form(field(b"model", b"a")),
        form(field(b"model", b"a"))[:-6],
        form(field(b"model", b"a"), field(b"model", b"b")),
        form(field(b"model", b"\xff")),
        form(field(b"model", b"m" * 1025)),
        b"--edge \r\n" + form(field(b"model", b"a"))[8:],
        b"--edge\r\n%b\r\n\r\na\r\n--edgeX\r\n--edge--" % (NAMED % b"model"),
        form(*[field(b"x", b"")] * 257),
        form((NAMED % b"model" + b"\r\nx: " + b"y" * 5000, b"a")),
    ],
)
def test_a_form_that_could_be_read_in_two_ways_is_refused(body: bytes) -> None:
    assert "not a form that can be served" in refusal(body)


@pytest.mark.parametrize(
    "kind",
    ["multipart/form-data", f"{KIND}; charset=utf-16", f"{KIND}; boundary=b", f"{KIND[:-4]}a b"],
)
def test_a_kind_of_form_that_is_not_clear_is_refused(kind: str) -> None:
    assert "boundary" in refusal(form(field(b"model", b"a")), kind)


def test_a_renamed_form_names_the_other_model_alone() -> None:
    for before in ([field(b"model", b"alias")], [field(b"model", b"")]):
        found = renamed(read_form(form((FILE, b"RIFF"), *before), KIND), "org/é")
        assert found.body == form((FILE, b"RIFF"), field(b"model", "org/é".encode()))
    found = renamed(read_form(form((FILE, b"RIFF")), KIND), "m")
    assert read_form(found.body, KIND).model == "m"
    assert found.body.endswith(form((FILE, b"RIFF")))
    assert found.body[slice(*found.spans["model"])] == b"m"
