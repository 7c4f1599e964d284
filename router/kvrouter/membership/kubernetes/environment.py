"""Where the API server is: as the environment of a Pod says, or by a kubeconfig."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter.credentials.tls import client_context, show_certificate
from kvrouter.membership.kubernetes.api import ApiFailed, ApiServer
from kvrouter.membership.kubernetes.credentials import Credentials, bearer, credentials_of
from kvrouter.membership.kubernetes.kubeconfig import first_that_exists, read_kubeconfig
from kvrouter.membership.kubernetes.program import DEADLINE_S, ProgramCredentials
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.membership.kubernetes.kubeconfig import Kubeconfig

T = TypeVar("T")

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a Pod's token, which it replaces every hour, and the cluster's CA."""
_DEFAULT: Final = "~/.kube/config"
READ_S: Final = 10.0
"""For files, which may lie on a network."""


class ServerFinder:
    """Finds the API server, with credentials as they are now.

    As kubectl does, a kubeconfig that is named (by a context, or by KUBECONFIG) wins over the Pod's
    own account; outside of a Pod, ~/.kube/config is used.

    Args:
        environment: variables of the router.
        account: the folder of the Pod's account.
        program_s: deadline of a program that makes credentials.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        account: Path = SERVICE_ACCOUNT,
        program_s: float = DEADLINE_S,
    ) -> None:
        self._environment = environment
        self._account = account
        self._program = ProgramCredentials(environment, program_s)

    async def __call__(self, context: str | None) -> ApiServer:
        """The server of a context, None: of the current one, or of the Pod's own cluster.

        Raises:
            ApiFailed: files are missing or wrong, or a program is.
        """
        host = self._environment.get("KUBERNETES_SERVICE_HOST", "")
        files = self._environment.get("KUBECONFIG", "")
        if context is None and not files and host:
            port = self._environment.get("KUBERNETES_SERVICE_PORT", "443")
            return await _in_thread(lambda: _own_account(host, port, self._account))
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
