"""Keys: how they are written, what is refused, what is found, and that none is ever repeated."""

import hashlib
import stat
import sys
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from kvrouter.access.callers import Caller, KeyRing
from kvrouter.app.settings import RouterSettings
from kvrouter.cli.main import main
from kvrouter.credentials.caller_keys import PREFIX, Key, digest, file_line, new_key, read_keys
from kvrouter.credentials.engine_keys import WorkerKeys, by_engine, read_worker_keys
from kvrouter.engines.engine import Engine, Role
from kvrouter.errors import ApiError
from kvrouter.options.load import load

SECRET = "the-very-secret-key"
HASH = "sha256:" + hashlib.sha256(SECRET.encode()).hexdigest()
FULL = f"""
research: {HASH}
batch:
  key: [sha256:{"a" * 64}, sha256:{"B" * 64}]
  models: [llama, qwen]
  requests_per_s: 0.5
  tokens_per_min: 60000
  max_concurrent: 4
"""


def written(folder: Path, text: str, name: str = "keys.yaml") -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_file_names_callers_by_the_hash_of_their_keys(tmp_path: Path) -> None:
    research, batch = read_keys(written(tmp_path, FULL))
    assert research == Key("research", (digest(SECRET),))
    assert batch.digests == (bytes.fromhex("a" * 64), bytes.fromhex("b" * 64))
    assert batch.models == frozenset({"llama", "qwen"})
    assert (batch.requests_per_s, batch.request_burst) == (0.5, 1)
    assert (batch.tokens_per_min, batch.token_burst, batch.max_concurrent) == (60000, 60000, 4)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no key; write a line `NAME: sha256:HASH`"),
        ("- a\n", "names no key"),
        ("a: [\n", "is not YAML"),
        (f"a: {SECRET}\n", "a: a key is sha256: and 64 hex digits"),
        (f"{SECRET} x: {HASH}\n", "an entry is no name"),
        ("kvr-a: sha256:0\n", "an entry is no name"),
        ("a:\n", "a: expected `object`"),
        (f"a: {{key: {HASH}, modles: [m]}}\n", "unknown field `modles`"),
        (f"a: {{key: {HASH}, requests_per_s: 0}}\n", "a.requests_per_s: expected `float` > 0"),
        (f"a: {{key: {HASH}, max_concurrent: x}}\n", "a.max_concurrent: expected `int"),
        ("a: {models: [m]}\n", "missing required field `key`"),
        ("a: {key: []}\n", "a: a key is sha256:"),
        (f"a: {HASH}\na: {HASH}\n", "'a' occurs twice"),
        (f"a: &x {HASH}\nb: {{key: *x}}\n", ""),
    ],
)
def test_what_is_wrong_with_a_file_is_told_without_repeating_a_key(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = written(tmp_path, text)
    if not complaint:
        with pytest.raises(ValueError, match="'b' has the key of 'a'"):
            RouterSettings(decode=["d:1"], api_key_file=path)
        return
    with pytest.raises(ValueError, match=complaint.split("`", maxsplit=1)[0]) as told:
        read_keys(path)
    assert complaint in str(told.value)
    assert SECRET not in str(told.value)


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = Path(written(tmp_path, FULL))
    path.chmod(0o666)
    with pytest.raises(ValueError, match="chmod o-w"):
        read_keys(str(path))
    with pytest.raises(ValueError, match="No such file or directory; give a readable file"):
        read_keys(str(tmp_path / "absent"))


def find(ring: KeyRing, header: str) -> Caller | None:
    return ring.find(header)


@given(st.text(st.characters(max_codepoint=255), max_size=80))
def test_a_header_is_a_caller_only_if_its_key_is(text: str) -> None:
    ring = KeyRing()
    ring.follow([Key("a", (digest("k"),))])
    for header in (text, f"Bearer {text}", f"Basic {text}", f"Bearer k{text}"):
        found = find(ring, header)
        scheme, _, key = header.partition(" ")
        assert (found is not None) == (scheme.lower() == "bearer" and key.strip(" \t") == "k")


@given(st.text(st.characters(max_codepoint=255), min_size=1, max_size=600))
def test_a_key_is_found_by_the_hash_that_the_file_has(text: str) -> None:
    key, ring = text.strip(" \t"), KeyRing()
    ring.follow([Key("a", (digest(key),)), Key("b", (digest(key + "x"),))])
    found = find(ring, f"Bearer {text}")
    assert (found.name if found is not None else None) == ("a" if key else None)


def test_a_header_is_hashed_up_to_its_bound_and_only_of_the_characters_of_headers() -> None:
    longest, ring = "k" * (2048 - len("Bearer ")), KeyRing()
    ring.follow([Key("a", (digest(longest), digest(longest + "k"), digest("\xac")))])
    assert find(ring, f"Bearer {longest}") is not None
    assert find(ring, f"Bearer {longest}k") is None
    assert find(ring, "Bearer \u20ac") is None


@pytest.mark.parametrize("header", ["Bearer k", "bearer k", "BEARER   k ", "Bearer \tk\t"])
def test_the_scheme_is_read_as_the_standard_says(header: str) -> None:
    ring = KeyRing()
    ring.follow([Key("a", (digest("k"),))])
    found = find(ring, header)
    assert found is not None
    assert found.name == "a"


@pytest.mark.parametrize(
    "header", ["", "k", "Bearer", "Bearer ", "Token k", "Bearer k, Bearer k", "x" * 10**6]
)
def test_what_is_no_bearer_key_is_nobodys(header: str) -> None:
    ring = KeyRing()
    ring.follow([Key("a", (digest("k"), digest("")))])
    assert find(ring, header) is None


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begin(caller: Caller) -> None:
    caller.begin()
    caller.requests += 1


def use(caller: Caller, prompt: int, generated: int = 0) -> None:
    caller.admit(prompt)
    caller.charge(generated)
    caller.tokens += prompt + generated


def refusal(ring: KeyRing, name: str) -> ApiError:
    caller = next(caller for caller in ring.all() if caller.name == name)
    with pytest.raises(ApiError) as told:
        caller.begin()
    return told.value


def test_limits_are_told_with_the_time_to_wait() -> None:
    clock = Clock()
    ring = KeyRing(clock)
    ring.follow([Key("a", (b"a",), requests_per_s=0.1, request_burst=2, max_concurrent=2)])
    [caller] = ring.all()
    begin(caller)
    begin(caller)
    full = refusal(ring, "a")
    assert (full.status, full.retry_after_s, full.code) == (429, 1, "rate_limit_exceeded")
    caller.ended += 1
    assert refusal(ring, "a").retry_after_s == 10
    clock.now_s += 10
    begin(caller)
    assert caller.running == 2
    assert caller.refused == {"concurrency": 1, "requests": 1}


def test_tokens_of_prompts_and_answers_count_together() -> None:
    clock = Clock()
    ring = KeyRing(clock)
    ring.follow([Key("a", (b"a",), tokens_per_min=60, token_burst=100)])
    [caller] = ring.all()
    use(caller, 90, 70)
    with pytest.raises(ApiError) as told:
        caller.admit(1)
    assert told.value.retry_after_s == 61
    clock.now_s += 61
    use(caller, 1)
    assert caller.tokens == 161


def test_other_keys_keep_what_is_under_way_and_what_was_used() -> None:
    clock = Clock()
    ring = KeyRing(clock)
    first = Key("a", (digest("1"),), requests_per_s=0.1, request_burst=1)
    ring.follow([first, Key("gone", (digest("2"),))])
    caller, gone = ring.all()
    begin(caller)
    begin(gone)
    ring.follow([Key("a", (digest("3"),), requests_per_s=0.1, request_burst=1)])
    assert find(ring, "Bearer 1") is None
    assert find(ring, "Bearer 2") is None
    assert find(ring, "Bearer 3") is caller
    assert caller.running == 1
    assert refusal(ring, "a").retry_after_s == 10
    gone.ended += 1  # what it had under way ends as ever
    assert gone.running == 0


# -- the command


def test_a_new_key_is_printed_once_with_the_line_for_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["key", "new", "research"]) == 0
    key, line = capsys.readouterr().out.splitlines()
    assert key.startswith(PREFIX)
    assert len(key) > 40
    [found] = read_keys(written(tmp_path, line))
    assert (found.name, found.digests) == ("research", (digest(key),))
    assert new_key() != new_key()


def test_a_new_key_is_added_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = []
    for name in ("a", "b"):
        assert main(["key", "new", name, "--file", str(path)]) == 0
        keys.append(capsys.readouterr().out.strip())
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    assert main(["key", "new", "c", "--file", str(path)]) == 0
    keys.append(capsys.readouterr().out.strip())
    assert [key.digests for key in read_keys(str(path))] == [(digest(key),) for key in keys]
    assert all(key not in path.read_text() for key in keys)
    assert not path.stat().st_mode & stat.S_IWOTH
    assert main(["key", "new", "b", "--file", str(path)]) == 2
    assert "has 'b' already" in capsys.readouterr().err
    assert main(["key", "new", "x y"]) == 2
    assert main(["key", "new", "d", "--file", str(tmp_path / "no" / "keys")]) == 2


def test_the_hash_is_the_one_that_any_tool_makes() -> None:
    made = run(
        [sys.executable, "-c", "import hashlib;print(hashlib.sha256(b'abc').hexdigest())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert file_line("a", "abc") == f"a: sha256:{made.stdout.strip()}"


# -- settings


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["serve", "--decode", "d:1", *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


def test_keys_are_not_shown_and_not_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVROUTER_API_KEY", f"{SECRET}-1,{SECRET}-2")
    monkeypatch.setenv("KVROUTER_WORKER_API_KEY", f"{SECRET} a:1={SECRET}")
    assert main(["config", "show", "serve", "--decode", "d:1"]) == 0
    shown = capsys.readouterr().out
    assert SECRET not in shown
    assert 'api_key: ["**********", "**********"]  # environment KVROUTER_API_KEY' in shown
    settings = load(RouterSettings, {"decode": ["d:1"]}).settings
    assert [key.name for key in settings.caller_keys()] == ["api-key-1", "api-key-2"]
    assert settings.engine_keys() == {"": SECRET, "a:1": SECRET}
    config = written(tmp_path, f'decode: d:1\napi_key: "{SECRET}\n', "kvrouter.yaml")
    assert SECRET not in refused(capsys, "--config", config)
    config = written(tmp_path, "decode: d:1\nadmin_token: 4711\n", "kvrouter.yaml")
    told = refused(capsys, "--config", config)
    assert "admin_token" in told
    assert "4711" not in told
    config = written(tmp_path, "decode: d:1\napi_key: 4711\n", "kvrouter.yaml")
    monkeypatch.delenv("KVROUTER_API_KEY")
    told = refused(capsys, "--config", config)
    assert "put it between quotes" in told
    assert "4711" not in told
    assert SECRET not in refused(capsys, "--worker-api-key", SECRET, f"{SECRET}x")
    assert SECRET not in refused(capsys, "--api-key", f"{SECRET}\u00e4")
    assert "two keys for a:1" in refused(capsys, "--worker-api-key", f"a:1={SECRET}", "a:1=x")


def test_worker_keys_are_for_all_engines_or_for_one(tmp_path: Path) -> None:
    path = Path(written(tmp_path, "# of all\nk==\n\n10.0.0.1:80=a:b=c\n[::1]:9=d\n", "workers"))
    listed = {"": "k==", "10.0.0.1:80": "a:b=c", "[::1]:9": "d"}
    assert by_engine(read_worker_keys(str(path))) == listed
    settings = RouterSettings(
        decode=["d:1"],
        worker_api_key_file=str(path),
        worker_api_key=[SecretStr("10.0.0.1:80=flag")],
    )
    assert settings.engine_keys() == {**listed, "10.0.0.1:80": "flag"}
    path.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by other users: chmod 600"):
        read_worker_keys(str(path))


def test_an_engines_key_takes_the_place_of_the_clients() -> None:
    one, other = Engine("a:1", Role.DECODE), Engine("b:1", Role.DECODE)
    one.set_ranks([0, 1])
    sent = b"x-request-id: i\r\nauthorization: Bearer user\r\nbaggage: authorization: x\r\n"
    keys = WorkerKeys({"a:1": "A"})
    assert keys.shown(other.address, sent) == sent
    expected = sent.replace(b"authorization: Bearer user\r\n", b"") + b"authorization: Bearer A\r\n"
    for engine in (one, *one.ranks):
        assert keys.shown(engine.server.address, sent) == expected
        assert keys.headers(engine.server.address) == {"authorization": "Bearer A"}
        assert keys.judged(engine.server.address, 401)
        assert not keys.judged(engine.server.address, 404)
    assert keys.headers(other.address) == {}
    assert not keys.judged(other.address, 401)
    keys.alone = True
    assert keys.judged(other.address, 401)
