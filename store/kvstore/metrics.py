"""The metrics of a store node: each with its name, help and labels here and nowhere else.

`python -m kvstore.metrics` prints the table of docs/store.md. The values are the node's stats.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

__all__ = [
    "FAMILIES",
    "SHARING_REFUSED",
    "TENANT_FAMILIES",
    "Family",
    "metrics_table",
    "node_metrics",
]

NS_PER_S: Final = 1e9
TENANT: Final = ("tenant",)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Args:
        stat: what the node's stats call it. Its ending says what it is: `_total` a counter, `_ns` a
            histogram of times, anything else a gauge.
        help: what it tells; names the values of its labels where they are few.
        labels: of its series.
    """

    stat: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Its type, as Prometheus calls it."""
        if self.stat.endswith("_ns"):
            return "histogram"
        return "counter" if self.stat.endswith("_total") else "gauge"

    @property
    def name(self) -> str:
        """Its name as it is scraped; times are in seconds."""
        stat = self.stat
        return (
            f"kvstore:{stat.removesuffix('_ns')}_seconds"
            if self.kind == "histogram"
            else (f"kvstore:{stat}")
        )

    def metric(self, values: Mapping[str, int]) -> Metric:
        """The family with its samples; `values` by series, "" where it has no labels."""
        if self.kind == "histogram":
            return self._histogram(values)
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for series, value in values.items():
            if bool(series) == bool(self.labels):  # the sum of its series is theirs to tell
                family.add_metric([series] if series else [], value)
        return family

    def _histogram(self, values: Mapping[str, int]) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        buckets: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for key, value in values.items():
            series, _, field = key.rpartition(".")
            if field == "sum":
                family.add_metric([series] if series else [], buckets[series], value / NS_PER_S)
            else:
                buckets[series].append((_bound(field.removeprefix("le_")), value))
        return family


FAMILIES: Final = (
    Family("pool_bytes", "Size of the pool."),
    Family("used_bytes", "Bytes of the pool that blocks have, committed or being written."),
    Family("lent_bytes", "Bytes that clients on this host have in advance, for what they put."),
    Family("free_bytes", "Bytes of the pool that no block and no client has."),
    Family(
        "page_bytes",
        "Size of the pages that the pool is made of: explicit (huge, set aside by the host), "
        "transparent (huge, made by the kernel) or small; 0 for the other kinds.",
        ("pages",),
    ),
    Family(
        "numa_used_bytes",
        "Used bytes in the memory of each NUMA node (0, 1 and so on); any: of a pool that is bound "
        "to none.",
        ("numa_node",),
    ),
    Family("blocks", "Blocks that can be matched or are being written."),
    Family("reserved_blocks", "Parts of blocks that are being written."),
    Family(
        "fenced_blocks",
        "Slots whose writer lost its connection, or its reservation by saying nothing, and may "
        "still reach them; not in use until it has let the pool go, its queue pair has ended, or "
        "it commits or aborts them.",
    ),
    Family("fenced_bytes", "Bytes of these slots."),
    Family(
        "pinned_blocks",
        "Blocks that the node keeps for readers: leased, being sent, or read in place when it "
        "wanted to evict them.",
    ),
    Family("leases", "Leases held."),
    Family("leased_blocks", "Blocks under leases; one under two counts twice."),
    Family("waits", "Requests that wait for a prefix to land."),
    Family(
        "connections",
        "Connections, by how they move blocks: shm, unix, tcp or rdma.",
        ("transport",),
    ),
    Family("queue_pairs", "Queue pairs that connections have or wait for, or that have to end."),
    Family("draining", "1 while the node lets what is under way end before it leaves, else 0."),
    Family("manifests", "Manifests registered since the node started."),
    Family("connections_total", "Connections accepted."),
    Family(
        "rejected_connections_total",
        "Connections ended because there were too many: new ones, or those that had said no HELLO.",
    ),
    Family(
        "bytes_in_total",
        "Bytes of blocks committed over shm, unix, tcp or rdma.",
        ("transport",),
    ),
    Family(
        "bytes_out_total",
        "Bytes of blocks given to readers: sent over unix or tcp, leased to who maps the pool "
        "(shm) or reads it over rdma.",
        ("transport",),
    ),
    Family("hits_total", "Blocks asked for and found, in memory or on the disk alone.", ("tier",)),
    Family(
        "misses_total",
        "Blocks asked for that the memory did not have, or neither it nor the disk (disk), or that "
        "follow one that was nowhere.",
        ("tier",),
    ),
    Family(
        "evictions_total",
        "Blocks that went: for want of room (capacity), deleted by a client, which one does "
        "whose digest of a block does not match, or purged.",
        ("reason",),
    ),
    Family("puts_total", "Requests that committed blocks, in full or in part."),
    Family("commits_total", "Parts of blocks committed."),
    Family(
        "posts_total",
        "Parts that clients on this host put without a request: stored, there already (exists), "
        "or refused for breaking a rule.",
        ("outcome",),
    ),
    Family("aborts_total", "Parts of blocks whose writer gave them up."),
    Family("no_space_total", "Requests to write for which eviction did not make enough room."),
    Family("corrupt_total", "Blocks not stored, or dropped, since their digest was wrong."),
    Family("fenced_total", "Slots that had to be fenced when their connection ended."),
    Family(
        "expired_reservations_total",
        "Reservations that ended because their connection said nothing for --reserve-timeout.",
    ),
    Family(
        "client_limited_total",
        "Requests to write that were cut short because their client had --reserve-limit of the "
        "pool.",
    ),
    Family(
        "landings_total",
        "Waits for a prefix that ended: landed, timeout, cancelled, or gone with their connection.",
        ("outcome",),
    ),
    Family("landing_wait_ns", "Time that waits which landed took; at once counts too."),
    Family(
        "operation_ns",
        "Time that the server spent on requests of each kind, with the payload of a put and "
        "without the sending of replies; the count is that of the requests.",
        ("operation",),
    ),
    Family(
        "attaches_total",
        "Connections that wished for RDMA: attached, refused for want of a queue pair, or gone "
        "before the answer.",
        ("outcome",),
    ),
    Family(
        "broken_attachments_total",
        "Connections over RDMA that ended in the midst of a put or a get.",
    ),
    Family("refusals_total", "Times that an engine said that it shares nothing."),
    Family("bad_frames_total", "Connections ended for breaking the protocol."),
    Family("unauthorized_total", "Clients and HTTP requests without a token of the node."),
    Family("tls_failures_total", "Connections ended since TLS failed; certificates, mostly."),
    Family("stalled_total", "Connections ended for being too slow."),
    Family("disk_bytes", "Size of the SSD tier."),
    Family("disk_used_bytes", "Bytes of it that blocks have, or that are not free again yet."),
    Family("disk_blocks", "Blocks on the disk or being written to it."),
    Family("disk_durable_blocks", "Blocks on the disk that a restart finds again."),
    Family("disk_journal_bytes", "Size of the disk's index."),
    Family("disk_queue", "Parts of blocks that are to be written to the disk."),
    Family("disk_reads", "Parts of blocks that are being read from the disk."),
    Family(
        "disk_bypassed",
        "1 while the disk is not used: full, read_errors, write_errors, slow, or its index cannot "
        "be written (journal).",
        ("reason",),
    ),
    Family(
        "disk_bypasses_total",
        "Times that the disk was put aside: full, read_errors, write_errors, slow or journal.",
        ("reason",),
    ),
    Family("disk_written_bytes_total", "Bytes of blocks written to the disk."),
    Family("disk_read_bytes_total", "Bytes of blocks read from the disk."),
    Family("disk_stored_total", "Parts of blocks recorded as lying on the disk."),
    Family("disk_promoted_total", "Parts of blocks brought from the disk into memory."),
    Family("disk_promotion_ns", "Time from when a part was wanted until it was in memory."),
    Family(
        "disk_skipped_total",
        "Parts of blocks not written: too many waited (queue_full), the block went before its turn "
        "(gone), there was no_room on the disk, or it was bypassed.",
        ("reason",),
    ),
    Family(
        "disk_errors_total",
        "Operations that failed: read, write, sync, of the index (journal), or bytes read that are "
        "not those that were written (corrupt).",
        ("kind",),
    ),
    Family(
        "disk_dropped_total",
        "Blocks forgotten since they could not be read or were corrupt; none of them was served.",
    ),
    Family(
        "disk_evictions_total",
        "Blocks that went from the disk: for want of room (capacity) or deleted by a client.",
        ("reason",),
    ),
    Family("disk_parked_total", "Requests that waited for blocks from the disk."),
    Family(
        "disk_late_total",
        "Of these, those answered with what was in memory when --disk-read-timeout had passed.",
    ),
    Family("disk_announced_total", "Prefixes brought from the disk since a router announced them."),
)
# Of a node with tokens alone; by the names that its file of tokens gives.
TENANT_FAMILIES: Final = (
    Family("tenant_quota_bytes", "What a tenant can count on; of those with a quota.", TENANT),
    Family("tenant_used_bytes", "Bytes of the pool that blocks of the tenant have.", TENANT),
    Family(
        "tenant_held_bytes",
        "Bytes of blocks of the tenant that cannot go: leased, being sent or written, or before "
        "such a block in its chain. Counted where there are several tenants.",
        TENANT,
    ),
    Family("tenant_blocks", "Blocks of the tenant, matchable or being written.", TENANT),
    Family("tenant_connections", "Connections that showed the tenant's token.", TENANT),
    Family("tenant_evictions_total", "Blocks of the tenant that went for want of room.", TENANT),
    Family("tenant_hits_total", "Blocks that the tenant asked for and found.", TENANT),
    Family("tenant_misses_total", "Blocks that the tenant asked for and did not find.", TENANT),
    Family(
        "tenant_limited_total",
        "Requests that were refused, or landed without their lease, for a limit of the tenant.",
        TENANT,
    ),
)
SHARING_REFUSED: Final = Family(
    "sharing_refused", "Engines that are connected and share nothing.", ("engine", "reason")
)


def node_metrics(stats: Mapping[str, int]) -> Iterable[Metric]:
    """The families with what a node's stats say; one that they lack has no samples."""
    values: dict[str, dict[str, int]] = defaultdict(dict)
    for key, value in stats.items():
        stat, _, series = key.partition(".")
        values[stat][series] = value
    families = (*FAMILIES, *(one for one in TENANT_FAMILIES if one.stat in values))
    return [family.metric(values[family.stat]) for family in families]


def metrics_table() -> str:
    """The metrics as a table in Markdown."""
    rows = ["| Metric | Type | Labels | Tells |", "|---|---|---|---|"]
    for family in (*FAMILIES, *TENANT_FAMILIES, SHARING_REFUSED):
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows) + "\n"


def _bound(ns: str) -> str:
    return "+Inf" if ns == "inf" else str(int(ns) / NS_PER_S)


if __name__ == "__main__":
    print(metrics_table(), end="")
