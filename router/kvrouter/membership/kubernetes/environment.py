"""Where the API server is: as the environment of a Pod says, or by a kubeconfig.

Why no client library: lightkube 1.0.1, the smallest, waits for exec plugins without a deadline,
takes no client certificate from them, reads answers without a bound, and brings an HTTP client of
its own; the official ones take 70 MB.

`ProgramCredentials` come from a program of the kubeconfig, by the protocol
client.authentication.k8s.io. The program gets no stdin and no variable of the router's own, and is
killed at its deadline.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 (msgspec reads it)
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from kvrouter.credentials.tls import client_context, show_certificate
from kvrouter.http.bounded_json import bounded
from kvrouter.membership.kubernetes.api import ApiFailed, ApiServer
from kvrouter.membership.kubernetes.kubeconfig import (
    content_of,
    first_that_exists,
    read_file,
    read_kubeconfig,
)
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.membership.kubernetes.kubeconfig import Kubeconfig, Program, User

DEADLINE_S: Final = 30.0  # a program may ask a server of its own
REAPED_S: Final = 5.0  # after SIGKILL: only a process that the kernel does not let go takes longer
MAX_ANSWER_BYTES: Final = 1 << 20
_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_EXTENSION: Final = "client.authentication.k8s.io/exec"
"""Under this name a cluster keeps what is for programs."""
T = TypeVar("T")

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a Pod's token, which it replaces every hour, and the cluster's CA."""
_DEFAULT: Final = "~/.kube/config"
READ_S: Final = 10.0  # for files, which may lie on a network
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What to show."""

    authorization: str = field(default="", repr=False)  # the header's value; "": no header
    # PEM of the client's certificate and its key; b"": none.
    certificate: bytes = field(default=b"", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """Those of each request."""
        return {"authorization": self.authorization} if self.authorization else {}


def credentials_of(user: User, folder: Path) -> Credentials:
    """What the kubeconfig in `folder` tells itself, or names a file of. ApiFailed: see there."""
    if user.auth_provider is not None:
        raise ApiFailed("its user has an auth-provider, which is unknown: use an exec program")
    if user.impersonated is not None:
        raise ApiFailed("its user acts as another (`as`), which is unknown: leave it out")
    token = user.token
    if user.token_file:  # as in client-go, it wins
        content = read_file(folder / user.token_file, f"tokenFile {folder / user.token_file}")
        token = content.decode("utf-8", "replace")
    named = user.username or user.password
    if token and named:
        raise ApiFailed("its user has both a token and a password; leave one out")
    if named:
        pair = b64encode(f"{user.username}:{user.password}".encode()).decode()
        return Credentials(f"Basic {pair}", _certificate(user, folder))
    return Credentials(bearer(token) if token else "", _certificate(user, folder))


def bearer(token: str) -> str:
    """The header's value; ApiFailed: the token cannot stand in one."""
    stripped = token.strip()
    if not _TOKEN.fullmatch(stripped):
        raise ApiFailed("the token is not one line of ASCII")
    return f"Bearer {stripped}"


def with_key(certificate: bytes, key: bytes) -> bytes:
    """One PEM of both; ApiFailed: one is missing."""
    if bool(certificate) is not bool(key):
        raise ApiFailed("there is a client certificate without a key, or a key alone")
    # A kubelet keeps both in one file, which its kubeconfig names twice.
    return certificate if certificate == key else certificate + b"\n" + key


def _certificate(user: User, folder: Path) -> bytes:
    data, path = user.client_certificate_data, user.client_certificate
    certificate = content_of("client-certificate", data, folder, path)
    return with_key(
        certificate, content_of("client-key", user.client_key_data, folder, user.client_key)
    )


class _Status(msgspec.Struct, rename="camel", frozen=True):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _Answer(msgspec.Struct, rename="camel", frozen=True):
    api_version: str
    kind: str
    status: _Status


@dataclass(eq=False, repr=False)
class ProgramCredentials:
    """What a program answered, until that expires or `forget` is called."""

    environment: Mapping[str, str]  # of the router, before the kubeconfig adds to it
    deadline_s: float = DEADLINE_S  # for one run
    now: Callable[[], float] = time.time  # a clock of seconds since 1970
    _asked: tuple[Program, str] | None = field(default=None, init=False)
    _kept: Credentials | None = field(default=None, init=False)
    _expires_at: float = field(default=0.0, init=False)

    def forget(self) -> None:
        """Ask the program anew next time: the server did not accept its answer."""
        self._kept = None

    async def get(self, program: Program, file: Kubeconfig) -> Credentials:
        """What `program` of `file` answers; ApiFailed: it cannot be had."""
        asked = (program, _question(program, file))
        if self._kept is not None and asked == self._asked and self.now() < self._expires_at:
            return self._kept
        self._kept = None
        try:
            status = _read(await self._run(program, asked[1], file), program.api_version)
            kept = _credentials(status)
        except ApiFailed as error:
            raise ApiFailed(f"its exec program {program.command}: {error}") from None
        expires = status.expiration_timestamp
        self._expires_at = expires.timestamp() if expires is not None else float("inf")
        self._asked, self._kept = asked, kept
        return kept

    async def _run(self, program: Program, question: str, file: Kubeconfig) -> bytes:
        command = program.command
        if os.sep in command:  # else it is looked up in PATH
            command = str(file.folder.absolute() / command)
        own = {n: value for n, value in self.environment.items() if not n.startswith("KVROUTER_")}
        more = {each.name: each.value for each in program.env}
        environment = {**own, **more, "KUBERNETES_EXEC_INFO": question}
        return await _output([command, *program.args], environment, self.deadline_s)


class _Output(asyncio.SubprocessProtocol):
    """Collects what a process writes, up to a bound, until it has ended."""

    def __init__(self) -> None:
        self.content = bytearray()
        # It has, and nobody holds its stdout any more; or it wrote too much.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()  # set once the event loop has reaped it

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        del fd
        self.content += data
        if len(self.content) > MAX_ANSWER_BYTES and not self.ended.done():
            self.ended.set_exception(ApiFailed(f"it answers more than {MAX_ANSWER_BYTES} bytes"))

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended, and nobody holds its stdout any more."""
        del error
        if not self.ended.done():
            self.ended.set_result(None)


async def _start(
    command: list[str], environment: dict[str, str]
) -> tuple[asyncio.SubprocessTransport, _Output]:
    starting = asyncio.create_task(
        asyncio.get_running_loop().subprocess_exec(
            _Output,
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=DEVNULL,  # it would stand between the lines of the log
            env=environment,
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # A cancelled subprocess_exec kills the process, but not what that has started by then.
        with suppress(OSError, ValueError):
            transport, output = await starting
            _kill(transport)
            await _close(transport, output)
        raise
    except OSError as error:
        raise ApiFailed(f"{reason_of(error)}; install it") from None
    except ValueError:
        raise ApiFailed("an argument or a variable of it cannot be passed") from None


def _kill(transport: asyncio.SubprocessTransport) -> None:
    with suppress(OSError):  # it may have ended, or be another user's
        os.killpg(transport.get_pid(), signal.SIGKILL)


async def _close(transport: asyncio.SubprocessTransport, output: _Output) -> None:
    """Let go of a process that has ended or was killed, once it is reaped.

    Before that its transport would outlive an event loop that ends now.
    """
    transport.close()  # its pipe, which what it left behind may still hold
    with suppress(TimeoutError):
        async with asyncio.timeout(REAPED_S):
            await output.exited.wait()
    transport.close()


async def _output(command: list[str], environment: dict[str, str], deadline_s: float) -> bytes:
    """What a command writes; it and what it started are killed unless it ends in time with 0."""
    transport, output = await _start(command, environment)
    try:
        async with asyncio.timeout(deadline_s):
            await output.ended
    except BaseException as error:
        _kill(transport)
        if isinstance(error, TimeoutError):
            raise ApiFailed(f"it does not end within {deadline_s:g} s") from None
        raise
    finally:
        await _close(transport, output)
    if code := transport.get_returncode():
        raise ApiFailed(f"it ends with {code}; run it by hand to see why")
    return bytes(output.content)


def _question(program: Program, file: Kubeconfig) -> str:
    """What a program is told, in KUBERNETES_EXEC_INFO."""
    if program.api_version not in _VERSIONS:
        raise ApiFailed(f"apiVersion of its exec program: write {_VERSIONS[0]}")
    if program.interactive_mode == "Always":
        raise ApiFailed(f"its exec program {program.command} needs a terminal; use another")
    spec: dict[str, object] = {"interactive": False}
    if program.provide_cluster_info:
        spec["cluster"] = _told(file)
    said = {"apiVersion": program.api_version, "kind": "ExecCredential", "spec": spec}
    return msgspec.json.encode(said).decode()


def _told(file: Kubeconfig) -> dict[str, object]:
    cluster = file.cluster
    config = next((each.extension for each in cluster.extensions if each.name == _EXTENSION), None)
    told = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": b64encode(file.authorities).decode(),
        "proxy-url": cluster.proxy_url,
        "config": config,
    }
    return {name: value for name, value in told.items() if value}


def _read(answer: bytes, version: str) -> _Status:
    with suppress(ValueError, RecursionError):  # whose text may be a secret
        read = msgspec.json.decode(bounded(answer), type=_Answer)
        if (read.api_version, read.kind) == (version, "ExecCredential"):
            return read.status
    raise ApiFailed(f"its answer is no ExecCredential of {version} with a status")


def _credentials(status: _Status) -> Credentials:
    pair = status.client_certificate_data or "", status.client_key_data or ""
    certificate = with_key(*(each.encode("utf-8", "replace") for each in pair))
    made = Credentials(bearer(status.token) if status.token else "", certificate)
    if made == Credentials():
        raise ApiFailed("its answer has neither a token nor a certificate")
    return made


@dataclass(eq=False, repr=False)
class ServerFinder:
    """Finds the API server, with credentials as they are now.

    As kubectl does, a kubeconfig that is named (by a context, or by KUBECONFIG) wins over the Pod's
    own account; outside of a Pod, ~/.kube/config is used.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)  # of the router
    account: Path = SERVICE_ACCOUNT  # the folder of the Pod's account
    program_s: float = DEADLINE_S  # deadline of a program that makes credentials

    def __post_init__(self) -> None:
        self._program = ProgramCredentials(self.environment, self.program_s)

    async def __call__(self, context: str | None) -> ApiServer:
        """The server of a context, None: of the current one, or of the Pod's own cluster.

        ApiFailed: files are missing or wrong, or a program is.
        """
        host = self.environment.get("KUBERNETES_SERVICE_HOST", "")
        files = self.environment.get("KUBECONFIG", "")
        if context is None and not files and host:
            port = self.environment.get("KUBERNETES_SERVICE_PORT", "443")
            return await _in_thread(lambda: _own_account(host, port, self.account))
        path = await _in_thread(lambda: first_that_exists(files or os.path.expanduser(_DEFAULT)))
        try:
            return await self._by_kubeconfig(path, context)
        except ApiFailed as error:
            raise ApiFailed(f"kubeconfig {path}: {error}") from None

    async def _by_kubeconfig(self, path: Path, context: str | None) -> ApiServer:
        file = await _in_thread(lambda: read_kubeconfig(path, context))
        shown = Credentials()
        if file.tls:
            shown = await _in_thread(lambda: credentials_of(file.user, file.folder))
            if shown == Credentials() and file.user.exec is not None:
                shown = await self._program.get(file.user.exec, file)
        return ApiServer(
            url=file.cluster.server.rstrip("/"),
            namespace=file.namespace,
            headers=shown.headers,
            tls=await _in_thread(lambda: _tls(file, shown.certificate)) if file.tls else None,
            tls_name=file.cluster.tls_server_name or None,
            proxy=file.cluster.proxy_url or None,
            refused=self._program.forget,
        )


async def _in_thread(read: Callable[[], T]) -> T:
    try:
        async with asyncio.timeout(READ_S):
            return await asyncio.to_thread(read)
    except TimeoutError:
        raise ApiFailed(f"files of credentials cannot be read within {READ_S:g} s") from None


def _tls(file: Kubeconfig, certificate: bytes) -> ssl.SSLContext:
    try:
        context = client_context("", file.authorities)
        if certificate:
            show_certificate(context, certificate)
    except ValueError as error:
        raise ApiFailed(str(error)) from None
    if file.cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _own_account(host: str, port: str, account: Path) -> ApiServer:
    try:
        token = (account / "token").read_text("utf-8", "replace")
        namespace = (account / "namespace").read_text("utf-8", "replace").strip()
        tls = client_context(str(account / "ca.crt"))
    except OSError as error:
        raise ApiFailed(
            f"{error.filename}: {reason_of(error)}; give the router's Pod a serviceAccountName, "
            "and leave automountServiceAccountToken on"
        ) from None
    except ValueError as error:
        raise ApiFailed(str(error)) from None
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    headers = {"authorization": bearer(token)}
    return ApiServer(f"https://{place}", namespace or "default", headers, tls)
