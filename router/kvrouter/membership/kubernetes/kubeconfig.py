"""The API server of a kubeconfig: its certificates, tokens, and programs that make tokens.

kubernetes_asyncio reads it, the only use of that package: its import takes a second and 70 MB,
which a router in the cluster does without.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrouter.credentials.tls import client_context
from kvrouter.membership.kubernetes.api import ApiFailed, ApiServer

if TYPE_CHECKING:
    import ssl

READ_TIMEOUT_S = 30.0
"""A program that makes tokens may ask a server of its own."""


async def read_kubeconfig(files: str, context: str | None) -> ApiServer:
    """Read the files (paths, separated by colons) as they are now.

    ApiFailed: the package is missing, or they cannot be used.
    """
    if not _exists(files):
        raise ApiFailed(f"no kubeconfig {files}; give KUBECONFIG, or run the router in a Pod")
    try:
        library = await asyncio.to_thread(import_module, "kubernetes_asyncio")
    except ImportError:
        raise ApiFailed(
            "a kubeconfig needs kubernetes_asyncio: pip install 'kvrouter[k8s]'"
        ) from None
    found = library.client.Configuration()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            loader = await library.config.load_kube_config(files, context, found)
    except TimeoutError:
        raise ApiFailed(f"kubeconfig {files}: not read within {READ_TIMEOUT_S:g} s") from None
    except library.config.ConfigException as error:
        raise ApiFailed(f"kubeconfig {files}: {error}") from None
    except Exception as error:  # the library raises of any kind for a file that is no kubeconfig
        raise ApiFailed(f"kubeconfig {files} cannot be used: {error!r}") from None
    token = found.api_key.get("BearerToken")
    return ApiServer(
        url=found.host.rstrip("/"),
        namespace=loader.current_context["context"].get("namespace") or "default",
        headers={"authorization": token.strip()} if token else {},
        tls=_tls(found),
        tls_name=found.tls_server_name,
        proxy=found.proxy,
    )


def _exists(files: str) -> bool:
    return any(Path(each).is_file() for each in files.split(":"))


def _tls(found: Any) -> ssl.SSLContext | bool:
    if not found.verify_ssl:
        return False
    context = client_context(found.ssl_ca_cert or "")
    if found.cert_file:
        context.load_cert_chain(found.cert_file, found.key_file)
    return context
