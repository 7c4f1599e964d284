"""Settings of connections from clients: how long a slow client may take."""

from __future__ import annotations

from pydantic import BaseModel, ByteSize, Field

from kvrouter.http.server.limits import Limits
from kvrouter_store.descriptors import connections, lack
from kvrouter_store.free_memory import free_bytes, reader

_EACH = 2  # descriptors of a request: one to the client and one to an engine


class ClientSettings(BaseModel):
    """Bounds of what clients may hold of the router."""

    max_body_memory: ByteSize = Field(
        default=ByteSize(Limits().body_memory_bytes),
        gt=0,
        description="Memory for request bodies that have not arrived completely, as 512MiB. A "
        "request that finds too little is answered 503 with Retry-After; 413 if it needs more.",
        json_schema_extra={"section": "Clients"},
    )
    keep_alive_timeout_s: float = Field(
        default=Limits().idle_timeout_s,
        gt=0,
        description="How long a connection may be idle between two requests. Give more than the "
        "load balancer in front keeps its connections.",
        json_schema_extra={"flags": ["--timeout-keep-alive"]},
    )
    client_header_timeout_s: float = Field(
        default=Limits().head_timeout_s,
        gt=0,
        description="Longest time for the head of a request.",
    )
    client_body_timeout_s: float = Field(
        default=Limits().body_timeout_s,
        gt=0,
        description="Longest time for the body of a request.",
    )
    send_timeout_s: float = Field(
        default=Limits().write_timeout_s,
        gt=0,
        description="Longest time in which a client reads nothing of its answer.",
    )

    sse_keep_alive_interval_s: float = Field(
        default=15.0,
        ge=0,
        description="A streaming client that has got nothing for so long gets a comment, also "
        "while its request waits in the queue or for its prefill leg, so that no load balancer "
        "cuts it off. After a comment an error is an event of the stream. 0: no comments.",
    )

    @property
    def limits(self) -> Limits:
        """Of the public port."""
        return Limits(
            connections=connections(Limits().connections, _EACH),
            body_memory_bytes=self.max_body_memory,
            body_bytes=min(Limits().body_bytes, self.max_body_memory),
            idle_timeout_s=self.keep_alive_timeout_s,
            head_timeout_s=self.client_header_timeout_s,
            body_timeout_s=self.client_body_timeout_s,
            write_timeout_s=self.send_timeout_s,
        )

    @property
    def lacks(self) -> list[str]:
        """Sentences where this host allows less of open files or memory than these bounds."""
        found = [lack(Limits().connections, _EACH)]
        free = free_bytes(reader())
        if free is not None and free < self.max_body_memory:
            found.append(
                f"--max-body-memory {self.max_body_memory.human_readable()} is more than the "
                f"{ByteSize(free).human_readable()} of memory that are free here, and the kernel "
                "ends processes that exceed it: lower it, or give the container a larger limit"
            )
        return list(filter(None, found))
