import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrouter.options.load import load
from kvrouter_store.node.settings import StoreSettings


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("512MiB", 512 << 20), ("1048576", 1 << 20)]
)
def test_sizes_are_written_as_people_write_them(text: str, size: int) -> None:
    assert StoreSettings.model_validate({"memory": text}).memory == size


@pytest.mark.parametrize("level", ["debug", "INFO", "Warning", "error"])
def test_log_levels_are_taken_in_any_case(level: str) -> None:
    assert StoreSettings.model_validate({"log_level": level}).log_level == level.lower()


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "1KiB"},
        {"granule": "5000"},
        {"granule": "128KiB"},
        {"port": 70000},
        {"eviction": "fifo"},
        {"eviction": "density-seconds"},
        {"eviction": "lru", "eviction_objective": "seconds"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StoreSettings.model_validate(wrong)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_STORE_MEMORY", "2GiB")
    assert load(StoreSettings, {}).settings.memory == 2 << 30


def test_the_defaults_listen_on_loopback_only() -> None:
    assert StoreSettings().host == "127.0.0.1"


def test_a_unix_socket_can_be_named_or_left_out() -> None:
    assert StoreSettings.model_validate({"unix_socket": "none"}).unix_path() is None
    named = StoreSettings.model_validate({"unix_socket": "/run/kv.sock"}).unix_path()
    assert str(named) == "/run/kv.sock"
    assert StoreSettings.model_validate({"port": 7401}).unix_path() is not None


@pytest.mark.parametrize(
    ("text", "mode"), [("0600", 0o600), ("0660", 0o660), ("660", 0o660), ("0777", 0o777)]
)
def test_the_mode_of_the_socket_is_written_in_octal(text: str, mode: int) -> None:
    settings = StoreSettings.model_validate({"unix_socket_mode": text})
    assert int(settings.unix_socket_mode, 8) == mode
    assert settings.model_dump(mode="json")["unix_socket_mode"] == f"{mode:04o}"
    assert StoreSettings().unix_socket_mode == "0600"


@pytest.mark.parametrize("wrong", [432, 660, "", "rw", "0400", "0066", "1600", "0o660", "00600"])
def test_a_mode_that_is_a_number_or_keeps_the_owner_out_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError, match="as '0660'"):
        StoreSettings.model_validate({"unix_socket_mode": wrong})


def test_a_run_time_folder_that_is_not_there_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert StoreSettings().unix_path() == tmp_path / "kvstore-7400.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert StoreSettings().unix_path() == Path(f"/tmp/kvstore-{os.getuid()}/kvstore-7400.sock")
