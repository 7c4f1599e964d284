"""Where the API server is: as the environment of a Pod says, or by a kubeconfig."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvrouter.credentials.tls import client_context
from kvrouter.membership.kubernetes.api import ApiFailed, ApiServer
from kvrouter.membership.kubernetes.kubeconfig import read_kubeconfig
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a Pod's token, which it replaces every hour, and the cluster's CA."""


async def find_server(
    context: str | None,
    environment: Mapping[str, str] = os.environ,
    account: Path = SERVICE_ACCOUNT,
) -> ApiServer:
    """The API server, with credentials as they are now.

    As kubectl does, a kubeconfig that is named (by `context`, or by KUBECONFIG) wins over the Pod's
    own account; outside of a Pod, ~/.kube/config is used.

    Raises:
        ApiFailed: files are missing or wrong, or the package that reads a kubeconfig is.
    """
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    files = environment.get("KUBECONFIG", "")
    if context is None and not files and host:
        return _own_account(host, environment.get("KUBERNETES_SERVICE_PORT", "443"), account)
    return await read_kubeconfig(files or str(Path.home() / ".kube" / "config"), context)


def _own_account(host: str, port: str, account: Path) -> ApiServer:
    try:
        token = (account / "token").read_text().strip()
        namespace = (account / "namespace").read_text().strip()
        tls = client_context(str(account / "ca.crt"))
    except OSError as error:
        raise ApiFailed(
            f"{error.filename}: {reason_of(error)}; give the router's Pod a serviceAccountName, "
            "and leave automountServiceAccountToken on"
        ) from None
    except ValueError as error:
        raise ApiFailed(str(error)) from None
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    headers = {"authorization": f"Bearer {token}"}
    return ApiServer(f"https://{place}", namespace or "default", headers, tls)
