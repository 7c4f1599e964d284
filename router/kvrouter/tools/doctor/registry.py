"""Every check of the doctor, in the order in which it prints findings of one severity."""

from __future__ import annotations

from inspect import getdoc
from typing import TYPE_CHECKING, Final

from kvrouter.tools.docs.markdown import table
from kvrouter.tools.doctor import (
    discovery,
    end_to_end,
    engines,
    events,
    host,
    rdma,
    sharing,
    store,
    tokenizers,
)
from kvrouter.tools.doctor.base import Check, Found, Setup

if TYPE_CHECKING:
    from collections.abc import Callable


def _check(examine: Callable[[Setup], Found]) -> Check:
    """A function as a check: its name with dashes, and the first line of its docstring."""
    ensures = (getdoc(examine) or "").partition("\n")[0].removesuffix(".")
    return Check(examine.__name__.replace("_", "-"), ensures, examine)


TOPICS: Final = {
    "Discovery": (discovery.discovery,),
    "Engines": (
        engines.engine_reachable,
        engines.engine_introduction,
        engines.models,
        engines.aliases,
        engines.context_length,
        engines.engine_version,
        engines.prefix_caching,
        engines.host_memory,
        engines.clock,
    ),
    "Shared KV": (
        sharing.family,
        sharing.connector,
        sharing.connector_waits,
        sharing.same_store,
        sharing.store_node,
        sharing.block_size,
        sharing.block_hashes,
        sharing.kv_dtype,
        sharing.weights,
        sharing.kv_layout,
    ),
    "Tokens": (tokenizers.tokenizer, tokenizers.chat_template),
    "The store": (
        store.store_reachable,
        store.store_token,
        store.store_tls,
        store.store_room,
        store.store_pressure,
        store.store_health,
        store.store_disk,
        store.store_tier,
        store.store_tier_up,
        store.store_transport,
        store.store_rdma,
        store.store_events,
    ),
    "A prompt through both legs": (
        end_to_end.connector_role,
        end_to_end.landing,
        end_to_end.end_to_end,
    ),
    "KV events": (events.kv_events,),
    "This host": (
        host.open_files,
        host.locked_memory,
        host.shared_memory,
        host.huge_pages,
        host.numa,
    ),
    "RDMA on this host": (rdma.rdma_port, rdma.rdma_gid, rdma.rdma_mtu),
}
"""A new check is a function here. Its docstring says what it ensures."""

_CHECKS: Final = {topic: tuple(map(_check, functions)) for topic, functions in TOPICS.items()}
CHECKS: Final = tuple(check for checks in _CHECKS.values() for check in checks)

HEAD: Final = """\
# Checks of kvrouter doctor

<!-- Written by `python -m kvrouter.tools.doctor.registry`; do not edit. -->

What [`kvrouter doctor`](doctor.md) checks:

"""


def checks_page() -> str:
    """The whole of docs/doctor-checks.md, in Markdown."""
    rows = []
    for topic, checks in _CHECKS.items():
        rows.append((f"**{topic}**", ""))
        rows += [(f"`{check.name}`", check.ensures) for check in checks]
    return f"{HEAD}{table(('Check', 'What it ensures'), rows)}\n"


if __name__ == "__main__":
    print(checks_page(), end="")
