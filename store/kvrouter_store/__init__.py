"""A KV store for engines: blocks of KV, named by what they mean, shared by every engine.

    from kvrouter_store import StoreClient

    with StoreClient("kv://127.0.0.1:7400") as client:
        print(client.stats()["blocks"])

Every name loads its module when it is first used: a connector in an engine loads no more than it
needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrouter_store._core import BlockStatus as BlockStatus
    from kvrouter_store._core import Segments as Segments
    from kvrouter_store.client.asyncio_client import AsyncLanding as AsyncLanding
    from kvrouter_store.client.asyncio_client import AsyncLease as AsyncLease
    from kvrouter_store.client.asyncio_client import AsyncStoreClient as AsyncStoreClient
    from kvrouter_store.client.blocking import StoreClient as StoreClient
    from kvrouter_store.client.lease import Landing as Landing
    from kvrouter_store.client.lease import Lease as Lease
    from kvrouter_store.client.lease import Reservation as Reservation
    from kvrouter_store.client.results import Match as Match
    from kvrouter_store.client.results import PutResult as PutResult
    from kvrouter_store.client.results import RegisteredManifest as RegisteredManifest
    from kvrouter_store.client.results import SharingRefusal as SharingRefusal
    from kvrouter_store.connection.tls import ClientTls as ClientTls
    from kvrouter_store.errors import BadDocument as BadDocument
    from kvrouter_store.errors import CorruptBlock as CorruptBlock
    from kvrouter_store.errors import DeadlineExceeded as DeadlineExceeded
    from kvrouter_store.errors import KVStoreError as KVStoreError
    from kvrouter_store.errors import LeaseLost as LeaseLost
    from kvrouter_store.errors import StoreClosed as StoreClosed
    from kvrouter_store.errors import StoreRefused as StoreRefused
    from kvrouter_store.errors import StoreUnavailable as StoreUnavailable
    from kvrouter_store.errors import Unauthorized as Unauthorized
    from kvrouter_store.errors import UnknownManifest as UnknownManifest
    from kvrouter_store.errors import Untrusted as Untrusted
    from kvrouter_store.identity.block import CacheSpec as CacheSpec
    from kvrouter_store.identity.block import Manifest as Manifest
    from kvrouter_store.identity.block import Part as Part
    from kvrouter_store.identity.chain import BlockHashes as BlockHashes
    from kvrouter_store.identity.chain import hash_tokens as hash_tokens
    from kvrouter_store.identity.chain import root_hash as root_hash
    from kvrouter_store.identity.layout import Layout as Layout
    from kvrouter_store.rdma.initiator import Initiator as Initiator
    from kvrouter_store.rdma.options import RdmaOptions as RdmaOptions

_NAMES_IN = {
    "_core": "BlockStatus Segments",
    "client.asyncio_client": "AsyncLanding AsyncLease AsyncStoreClient",
    "client.blocking": "StoreClient",
    "client.lease": "Landing Lease Reservation",
    "client.results": "Match PutResult RegisteredManifest SharingRefusal",
    "connection.tls": "ClientTls",
    "errors": "BadDocument CorruptBlock DeadlineExceeded KVStoreError LeaseLost StoreClosed "
    "StoreRefused StoreUnavailable Unauthorized UnknownManifest Untrusted",
    "identity.block": "CacheSpec Manifest Part",
    "identity.chain": "BlockHashes hash_tokens root_hash",
    "identity.layout": "Layout",
    "rdma.initiator": "Initiator",
    "rdma.options": "RdmaOptions",
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names.split()}


def _load(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next use finds it there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


if not TYPE_CHECKING:  # which would take any name for one of the package
    __getattr__ = _load
