"""The watched file: half-written, replaced, linked, wrong."""

import asyncio
import os
from pathlib import Path

import pytest
from tests.fakes.discovery import LOOK_S
from tests.integration.discovery.conftest import followed

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import Members
from kvrouter.membership.discovery.file import FileSource, read_members
from kvrouter.options.load import MAX_BYTES, UnreadableFile

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
BOTH_LISTS = f"prefill: [{A}]\ndecode:\n  - http://{B}\n"


def source(path: Path) -> FileSource:
    return FileSource(str(path), look_s=LOOK_S)


def read(folder: Path, text: bytes) -> Members:
    path = folder / "engines.yaml"
    path.write_bytes(text)
    return read_members(path)


@pytest.mark.parametrize(
    ("text", "members"),
    [
        (BOTH_LISTS, {A: Role.PREFILL, B: Role.DECODE}),
        (f"prefill: [{A}]\ndecode: [{A}]\n", {A: Role.BOTH}),
        (f"decode: {A}, {B}\n", {A: Role.DECODE, B: Role.DECODE}),
        ("# no engine yet\nprefill:\ndecode: []\n", {}),
        (
            "decode: [10.0.0.1:80, '[::1]:90']\n",
            {"10.0.0.1:80": Role.DECODE, "[::1]:90": Role.DECODE},
        ),
        (f'{{"decode": ["{A}"]}}', {A: Role.DECODE}),
        (f"decode: [rack1-a={A}]\n", {f"rack1-a={A}": Role.DECODE}),
    ],
)
def test_a_file_has_lists_of_engines(tmp_path: Path, text: str, members: dict[str, Role]) -> None:
    assert read(tmp_path, text.encode()) == members


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", ": it is empty; write `decode: []` where there are no members"),
        (b"# only this\n", ": it is empty"),
        (b"decode: [\n", ": not YAML (line 2)"),
        (b"decode:\n- a:1\n- b\n", ":1: engine 'b': give it as http://HOST:PORT or HOST:PORT"),
        (b"decode: [a:1]\n\ndecod: [b:1]\n", ":3: no setting 'decod'; did you mean decode?"),
        (b"decode: [a:1]\ndecode: [b:1]\n", ":2: 'decode' is already on line 1; give it once"),
        (b"decode:\n- {url: a:1}\n", ":1: engine"),
        (b"decode: 8000\n", ":1: engine '8000'"),
        (b"decode: !!timestamp x\n", ": not YAML"),
        (b"- a:1\n", ": not a mapping"),
        (b"decode: [a:1]\n---\ndecode: []\n", ": not YAML (line 2)"),
        (b"decode: [\xff]\n", ": not YAML"),
        (b"decode: [a:1]\x00", ": not YAML"),
        (b"[" * 100_000, ": more than 32 levels"),
        (b"x" * (MAX_BYTES + 1), ": more than 1 MiB"),
    ],
)
def test_an_error_names_its_file(tmp_path: Path, text: bytes, complaint: str) -> None:
    with pytest.raises((ValueError, UnreadableFile)) as told:
        read(tmp_path, text)
    assert str(told.value).startswith(f"{tmp_path / 'engines.yaml'}{complaint[:1]}")
    assert complaint in str(told.value)


async def test_a_wrong_file_changes_nothing_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(BOTH_LISTS)
    async with followed(source(path)) as heard:
        await heard.names({A: Role.PREFILL, B: Role.DECODE})
        path.write_text(f"decode:\n- {A}\n- nonsense\n")
        assert f"{path}:1: engine 'nonsense'" in await heard.complains()
        assert heard.members == {A: Role.PREFILL, B: Role.DECODE}
        path.write_text(f"decode: [{A}]\n")
        await heard.names({A: Role.DECODE})


async def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(f"decode:\n- {A}\n- {B}\n")
    looks = 0
    real = os.stat

    async with followed(source(path)) as heard:
        await heard.names({A: Role.DECODE, B: Role.DECODE})
        words = heard.words

        def counted(target: object, *args: object, **kwargs: object) -> os.stat_result:
            """Between any two looks the writer writes one more byte."""
            nonlocal looks
            if target == path and looks < len(text):
                with path.open("ab" if looks else "wb") as file:
                    file.write(text[looks : looks + 1])
                looks += 1
            return real(target, *args, **kwargs)  # type: ignore[arg-type]

        text = f"decode:\n- {B}\n- {A}\n- 10.0.0.3:8000\n".encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvrouter.membership.discovery.file.os.stat", counted)
            await heard.names({A: Role.DECODE, B: Role.DECODE, "10.0.0.3:8000": Role.DECODE})
        assert looks == len(text)
        assert heard.words == words + 1


async def test_a_file_can_be_replaced_and_be_a_link_to_another(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: a link to a link, of which the inner one is replaced."""
    for name, address in (("one", A), ("two", B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engines.yaml").write_text(f"decode: [{address}]\n")
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "engines.yaml").symlink_to("data/engines.yaml")
    async with followed(source(tmp_path / "engines.yaml")) as heard:
        await heard.names({A: Role.DECODE})
        (tmp_path / "fresh").symlink_to("two")
        os.replace(tmp_path / "fresh", tmp_path / "data")
        await heard.names({B: Role.DECODE})


async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    async with followed(source(tmp_path)) as heard:
        assert await heard.complains() == f"{tmp_path}: Is a directory; give a readable file"
    async with followed(source(tmp_path / "none.yaml")) as heard:
        assert await heard.complains() == f"{tmp_path / 'none.yaml'}: No such file or directory"


async def test_a_file_that_comes_late_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    async with followed(source(path)) as heard:
        await heard.complains()
        path.write_text(BOTH_LISTS)
        await heard.names({A: Role.PREFILL, B: Role.DECODE})


async def test_a_file_that_lies_still_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(BOTH_LISTS)
    looks = asyncio.Semaphore(0)
    real = os.stat

    def counted(target: object, *args: object, **kwargs: object) -> os.stat_result:
        if target == path:
            looks.release()
        return real(target, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrouter.membership.discovery.file.os.stat", counted)
        async with followed(source(path)) as heard:
            async with asyncio.timeout(20):
                for _ in range(5):
                    await looks.acquire()
            assert heard.words == 1
