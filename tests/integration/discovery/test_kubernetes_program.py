"""Programs that make credentials: what they get, what they may answer, and when they are ended."""

import asyncio
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.fakes.certificates import Authority
from tests.fakes.discovery import QUICK
from tests.fakes.kubernetes import KubernetesServer, server_tls
from tests.fakes.pods import pod, write_kubeconfig
from tests.integration.discovery.conftest import followed

from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.kubernetes import KubernetesSource
from kvrouter.membership.kubernetes.api import ApiFailed, ApiServer
from kvrouter.membership.kubernetes.environment import (
    MAX_ANSWER_BYTES,
    ProgramCredentials,
    ServerFinder,
)
from kvrouter.membership.kubernetes.kubeconfig import read_kubeconfig

V1 = "client.authentication.k8s.io/v1"
V1BETA1 = "client.authentication.k8s.io/v1beta1"
SECRET = "a-token-that-nobody-may-see"
URL = "https://127.0.0.1:1"
PATIENCE_S = 20.0


def answer(version: str = V1, **status: Any) -> str:
    said = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    return json.dumps(said)


def say(text: str) -> str:
    """The command that does; `echo` would read backslashes."""
    return f"cat <<'END'\n{text}\nEND"


class Place:
    """A folder with a kubeconfig whose user has a program: a shell script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counted = folder / "runs"
        self.environment = {"PATH": os.environ["PATH"]}

    def script(self, text: str, version: str = V1, **more: Any) -> Path:
        program = self.folder / "credentials"
        program.write_text(f"#!/bin/sh\necho run >> {self.counted}\n{text}\n")
        program.chmod(0o755)
        made = {"apiVersion": version, "command": "./credentials", "args": None, "env": None}
        return self.kubeconfig(made | more)

    def kubeconfig(self, program: dict[str, Any], url: str = URL, **more: Any) -> Path:
        return write_kubeconfig(self.folder, url, user={"exec": program}, **more)

    def says(self, text: str, version: str = V1, **more: Any) -> Path:
        return self.script(say(text), version, **more)

    @property
    def runs(self) -> int:
        return len(self.counted.read_text().split()) if self.counted.exists() else 0

    async def find(self, path: Path, program_s: float = PATIENCE_S) -> ApiServer:
        environment = self.environment | {"KUBECONFIG": str(path)}
        return await ServerFinder(environment, program_s=program_s)(None)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("version", [V1, V1BETA1])
async def test_a_program_makes_the_token_of_requests(
    place: Place, tmp_path: Path, version: str
) -> None:
    authority = Authority(tmp_path)
    server = KubernetesServer(server_tls(authority))
    server.token = SECRET
    await server.start()
    try:
        server.put("pods", "vllm-0", **pod())
        place.says(answer(version, token=SECRET, expirationTimestamp=None))
        program = {"apiVersion": version, "command": str(tmp_path / "credentials")}
        path = place.kubeconfig(program, server.url, ca=authority.ca_file)
        find = ServerFinder({"KUBECONFIG": str(path), "PATH": os.environ["PATH"]})
        source = KubernetesSource(
            "k8s://test?selector=app=engine", SourceContext(), find=find, times=QUICK
        )
        async with followed(source) as heard:
            await heard.until(lambda: len(heard.members or ()) == 1)
            for _ in range(3):
                await server.until_watched()
                server.end_watches()
                await server.until_asked()
            await server.until_watched()
            assert place.runs == 1, "its answer is kept"
            server.token = SECRET + "-2"
            place.says(answer(version, token=SECRET + "-2"))
            place.kubeconfig(program, server.url, ca=authority.ca_file)
            server.end_watches()
            await heard.complains()
            await heard.until(lambda: heard.problem is None)
            assert place.runs == 2, "it is asked again when the server refuses its answer"
    finally:
        await server.stop()


async def test_a_program_may_make_a_client_certificate_and_no_file_is_left(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = Authority(tmp_path).sign("router")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    path = place.says(
        answer(
            clientCertificateData=Path(signed.cert_file).read_text(),
            clientKeyData=Path(signed.key_file).read_text(),
        )
    )
    await place.find(path)  # the event loop opens what it keeps
    before = descriptors()
    for _ in range(5):
        found = await place.find(path)
        assert found.tls is not None
    assert list(temporary.iterdir()) == []
    await settled(lambda: descriptors() <= before)


@contextmanager
def stdin_of_a_pipe() -> Iterator[None]:
    """Under pytest it is /dev/null."""
    saved, ends = os.dup(0), os.pipe()
    os.dup2(ends[0], 0)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        for each in (saved, *ends):
            os.close(each)


def descriptors() -> set[str]:
    """Pipes and files in memory that this process holds."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(each)
        except OSError:  # that of the listing
            continue
        if target.startswith(("pipe:", "socket:", "/memfd:")):
            found.add(target)
    return found


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_a_program_is_told_what_it_needs_and_nothing_of_the_routers(
    place: Place, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    text = f"env > {seen}; readlink /proc/self/fd/0 >> {seen}; {say(answer(token=SECRET))}"
    extension = {"name": V1.replace("/v1", "/exec"), "extension": {"audience": "gpu"}}
    path = place.script(text, env=[{"name": "PROFILE", "value": "a b"}], provideClusterInfo=True)
    said = json.loads(path.read_text())
    said["clusters"][0]["cluster"] |= {"extensions": [extension], "tls-server-name": "kube"}
    path.write_text(json.dumps(said))
    place.environment |= {"HOME": "/nonexistent", "KVROUTER_ADMIN_TOKEN": "of-the-router"}
    with stdin_of_a_pipe():
        await place.find(path)
    got = dict(line.partition("=")[::2] for line in seen.read_text().splitlines())
    assert (got["PROFILE"], got["HOME"]) == ("a b", "/nonexistent")
    assert "KVROUTER_ADMIN_TOKEN" not in got
    assert "/dev/null" in got, "it has no stdin"
    assert json.loads(got["KUBERNETES_EXEC_INFO"]) == {
        "apiVersion": V1,
        "kind": "ExecCredential",
        "spec": {
            "interactive": False,
            "cluster": {
                "server": URL,
                "tls-server-name": "kube",
                "config": {"audience": "gpu"},
            },
        },
    }


async def test_a_program_and_what_it_started_are_killed_at_the_deadline(
    place: Place, tmp_path: Path
) -> None:
    held = Held(tmp_path)
    path = place.script(f"exec 9>{held.path}; echo begun >&9; sleep 1000 & sleep 1000")
    with held:
        with pytest.raises(ApiFailed, match=r"program ./credentials: it does not end within 1 s"):
            await place.find(path, program_s=1)
        await held.until(b"begun\n")
        await held.until(b"begun\n", let_go=True)


async def test_what_a_program_left_behind_in_another_session_holds_no_descriptor(
    place: Place, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    path = place.script(f"setsid sh -c 'echo $$ > {left}; exec sleep 1000'")
    before = descriptors()
    try:
        with pytest.raises(ApiFailed, match="it does not end within 1 s"):
            await place.find(path, program_s=1)
        await settled(lambda: descriptors() <= before)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("make", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize(
    "script",
    [
        "sleep 1000",
        "setsid sh -c 'echo $$ > left; exec sleep 1000'",
        f"head -c {MAX_ANSWER_BYTES + 1} /dev/zero; sleep 1000",
    ],
)
@pytest.mark.parametrize("cancelled", [False, True])
def test_an_event_loop_that_ends_behind_a_program_has_reaped_it(
    place: Place,
    script: str,
    cancelled: bool,
    make: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place.folder)
    path = place.script(script)
    before = set(children())

    async def run() -> None:
        asked = asyncio.create_task(place.find(path, program_s=PATIENCE_S if cancelled else 0.5))
        if cancelled:
            await settled(lambda: place.runs == 1)
            asked.cancel()
        with pytest.raises((ApiFailed, asyncio.CancelledError)):
            await asked
        assert set(children()) <= before, "what is killed is no zombie when its caller goes on"

    try:
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(run())
        gc.collect()  # a transport that is left complains of it
    finally:
        left = place.folder / "left"
        if left.exists() and (number := left.read_text().strip()):
            os.kill(int(number), signal.SIGKILL)


async def test_a_program_whose_caller_is_cancelled_is_killed(place: Place, tmp_path: Path) -> None:
    held = Held(tmp_path)
    path = place.script(f"exec 9>{held.path}; echo begun >&9; sleep 1000")
    with held:
        asked = asyncio.create_task(place.find(path))
        await held.until(b"begun\n")
        asked.cancel()
        await held.until(b"begun\n", let_go=True)
    await asyncio.gather(asked, return_exceptions=True)


async def test_a_program_whose_caller_is_cancelled_while_it_starts_is_killed(
    place: Place, tmp_path: Path
) -> None:
    held = Held(tmp_path)
    path = place.script(f"exec 9>{held.path}; sleep 1000 & echo begun >&9; wait")
    with held:
        asked = asyncio.create_task(place.find(path))
        await settled(lambda: bool(children()))
        with held.path.open("rb") as pipe:  # the event loop stands still meanwhile
            assert pipe.readline() == b"begun\n"
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await held.until(b"", let_go=True)


def children() -> list[str]:
    """Process ids of what this thread has started and not yet reaped."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


class Held:
    """A pipe with a name, which processes hold until they have ended."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "held"
        os.mkfifo(self.path)
        self._said = b""

    def __enter__(self) -> None:
        self._end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def __exit__(self, *_: object) -> None:
        os.close(self._end)

    def _let_go(self) -> bool:
        """Whether no process holds it; takes what was written."""
        try:
            more = os.read(self._end, 100)
        except BlockingIOError:
            return False
        self._said += more
        return not more

    async def until(self, said: bytes, *, let_go: bool = False) -> None:
        await settled(lambda: self._let_go() >= let_go and self._said == said)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("exit 3", "it ends with 3; run it by hand"),
        (say(SECRET), "its answer is no ExecCredential"),
        (say(answer(V1BETA1, token=SECRET)), "its answer is no ExecCredential of"),
        (say(answer()), "its answer has neither a token nor a certificate"),
        (say(answer(token=SECRET, expirationTimestamp=SECRET)), "no ExecCredential"),
        (say(answer(token=f"{SECRET}\nx")), "not one line of ASCII"),
        (say(answer(clientKeyData=SECRET)), "or a key alone"),
        (
            say(answer(clientKeyData=SECRET, clientCertificateData=SECRET)),
            "give a certificate and its key",
        ),
        (f"head -c {MAX_ANSWER_BYTES + 1} /dev/zero; sleep 1000", "it answers more than"),
    ],
)
async def test_a_program_that_fails_is_told_without_what_it_said(
    place: Place, script: str, complaint: str
) -> None:
    path = place.script(script)
    with pytest.raises(ApiFailed) as refused:
        await place.find(path)
    assert complaint in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ({"command": "no-such-program", "apiVersion": V1}, "No such file or directory"),
        ({"command": "x", "apiVersion": "client.authentication.k8s.io/v1alpha1"}, "write client"),
        ({"command": "x", "apiVersion": V1, "interactiveMode": "Always"}, "needs a terminal"),
    ],
)
async def test_a_program_that_cannot_be_asked_is_told(
    place: Place, program: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ApiFailed, match=complaint):
        await place.find(place.kubeconfig(program))


async def test_an_answer_is_kept_until_it_expires_or_is_refused(place: Place) -> None:
    path = place.says(answer(token=SECRET, expirationTimestamp="2030-01-01T00:00:00Z"))
    file = read_kubeconfig(path, None)
    assert file.user.exec is not None
    now = [1893456000.0 - 60]  # a minute earlier
    kept = ProgramCredentials(place.environment, PATIENCE_S, lambda: now[0])
    for _ in range(3):
        assert (await kept.get(file.user.exec, file)).authorization == f"Bearer {SECRET}"
    assert place.runs == 1
    kept.forget()
    await kept.get(file.user.exec, file)
    assert place.runs == 2
    now[0] += 60
    await kept.get(file.user.exec, file)
    assert place.runs == 3


async def test_own_credentials_of_the_user_need_no_program(place: Place) -> None:
    path = place.script("exit 1")
    said = json.loads(path.read_text())
    said["users"][0]["user"]["token"] = SECRET
    path.write_text(json.dumps(said))
    assert (await place.find(path)).headers == {"authorization": f"Bearer {SECRET}"}
    assert place.runs == 0
