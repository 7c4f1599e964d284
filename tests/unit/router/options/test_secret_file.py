"""Secrets from files: what is taken, and what is refused without repeating the secret."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from kvrouter.app.settings import RouterSettings
from kvrouter.cli.main import main
from kvrouter.membership.discovery.register import RegisterSettings
from kvrouter.tools.sim.settings import SimSettings

TOKEN = "a-token-of-more-than-sixteen-letters"
FLAGS = ("--admin-token-file", "--store-token-file", "--redis-password-file")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(TOKEN + "\n")
    return path


def test_the_newline_at_the_end_is_no_part_of_the_secret(file: Path) -> None:
    made = RouterSettings(decode=["d:1"], admin_token_file=str(file), store_token_file=str(file))
    assert made.admin_token.get_secret_value() == TOKEN
    assert made.store_token.get_secret_value() == TOKEN
    sim = SimSettings(model="m", store_token_file=str(file))
    assert sim.store_token.get_secret_value() == TOKEN


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://r:6379/0", "redis://:p%40ss%2Fw%3Ard@r:6379/0"),
        ("rediss://router@r:6379/0?ssl_ca_certs=a", "rediss://router:p%40ss%2Fw%3Ard@r:6379/0?"
         "ssl_ca_certs=a"),
        ("redis://[::1]/0", "redis://:p%40ss%2Fw%3Ard@[::1]/0"),
    ],
)  # fmt: skip
def test_the_password_of_redis_joins_its_url(file: Path, url: str, whole: str) -> None:
    file.write_text("p@ss/w:rd\n")
    path = str(file)
    made = RouterSettings(decode=["d:1"], redis=SecretStr(url), redis_password_file=path)
    assert made.redis.get_secret_value() == whole
    kept = RegisterSettings(decode=["d:1"], redis=SecretStr(url), redis_password_file=path)
    assert kept.redis.get_secret_value() == whole


def refused(capsys: pytest.CaptureFixture[str], *flags: str, command: str = "serve") -> str:
    assert main([command, "--decode", "d:1", *flags]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert TOKEN not in told
    return told


@pytest.mark.parametrize("flag", FLAGS)
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str
) -> None:
    path, redis = tmp_path / "secret", ("--redis", "redis://r:1/0")
    given = (*redis, flag, str(path))
    assert f"{flag} {path}: No such file or directory; give a readable file" in refused(
        capsys, *given
    )
    for content in (b"", b"\n", b"two\nlines\n" if flag != "--store-token-file" else b"a:\n"):
        path.write_bytes(content)
        assert f"{flag} {path}: write the secret into it, on the only line" in refused(
            capsys, *given
        )
    path.write_bytes(b"\xff\xfe")
    assert f"{flag} {path} is not UTF-8" in refused(capsys, *given)


def test_a_secret_and_its_file_are_not_given_together(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVROUTER_ADMIN_TOKEN", "of-the-environment")
    told = refused(capsys, "--admin-token-file", str(file))
    assert "--admin-token and --admin-token-file are both given; leave one out" in told
    monkeypatch.delenv("KVROUTER_ADMIN_TOKEN")
    told = refused(capsys, "--store-token", TOKEN, "--store-token-file", str(file))
    assert "--store-token and --store-token-file are both given" in told
    for redis in ((), ("--redis", "redis://:word@r:1/0")):
        told = refused(capsys, *redis, "--redis-password-file", str(file))
        assert "--redis-password-file needs a --redis URL without a password" in told


def test_a_nodes_file_of_one_tenant_serves_its_clients_too(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    file.write_text(f"# of the node\n\nresearch:{TOKEN}\n")
    made = RouterSettings(decode=["d:1"], store_token_file=str(file))
    assert made.store_token.get_secret_value() == TOKEN
    assert SimSettings(model="m", store_token_file=str(file)).store_token == made.store_token
    file.write_text(f"research:{TOKEN}\nbatch:{TOKEN}-2\n")
    told = refused(capsys, "--store-token-file", str(file))
    assert (
        f"--store-token-file {file}: it has several tokens; give a file with the token of" in told
    )


def test_the_token_of_a_store_has_its_form_in_a_file_too(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    file.write_text("short")
    told = refused(capsys, "--store-token-file", str(file))
    assert f"--store-token-file {file}: a token is 16 to 512 letters" in told
