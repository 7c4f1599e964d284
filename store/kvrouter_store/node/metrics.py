"""The metrics of a store node: each with its name, help and labels here and nowhere else.

Values are stats. docs/metrics.md lists them.
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

NS_PER_S: Final = 1e9
TENANT: Final = ("tenant",)


@dataclass(frozen=True, slots=True)
class MetricFamily:
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
    MetricFamily("pool_bytes", "Size of the pool."),
    MetricFamily("used_bytes", "Bytes of the pool that blocks have, committed or being written."),
    MetricFamily(
        "lent_bytes", "Bytes that clients on this host have in advance, for what they put."
    ),
    MetricFamily("free_bytes", "Bytes of the pool that no block and no client has."),
    MetricFamily(
        "page_bytes",
        "Size of the pages that the pool is made of: explicit (huge, set aside by the host), "
        "transparent (huge, made by the kernel) or small; 0 for the other kinds.",
        ("pages",),
    ),
    MetricFamily(
        "numa_used_bytes",
        "Used bytes in the memory of each NUMA node (0, 1 and so on); any: of a pool that is bound "
        "to none.",
        ("numa_node",),
    ),
    MetricFamily("blocks", "Blocks that can be matched or are being written."),
    MetricFamily("reserved_blocks", "Parts of blocks that are being written."),
    MetricFamily(
        "fenced_blocks",
        "Slots whose writer lost its connection, or its reservation by saying nothing, and may "
        "still reach them; not in use until it has let the pool go, its queue pair has ended, or "
        "it commits or aborts them.",
    ),
    MetricFamily("fenced_bytes", "Bytes of these slots."),
    MetricFamily(
        "pinned_blocks",
        "Blocks that the node keeps for readers: leased, being sent, or read in place when it "
        "wanted to evict them.",
    ),
    MetricFamily("leases", "Leases held."),
    MetricFamily("leased_blocks", "Blocks under leases; one under two counts twice."),
    MetricFamily("waits", "Requests that wait for a prefix to land."),
    MetricFamily(
        "connections",
        "Connections, by how they move blocks: shm, unix, tcp or rdma.",
        ("transport",),
    ),
    MetricFamily(
        "queue_pairs", "Queue pairs that connections have or wait for, or that have to end."
    ),
    MetricFamily(
        "draining", "1 while the node lets what is under way end before it leaves, else 0."
    ),
    MetricFamily("manifests", "Manifests registered since the node started."),
    MetricFamily("connections_total", "Connections accepted."),
    MetricFamily(
        "rejected_connections_total",
        "Connections ended because there were too many: new ones, or those that had said no HELLO.",
    ),
    MetricFamily(
        "bytes_in_total",
        "Bytes of blocks committed over shm, unix, tcp or rdma.",
        ("transport",),
    ),
    MetricFamily(
        "bytes_out_total",
        "Bytes of blocks given to readers: sent over unix or tcp, leased to who maps the pool "
        "(shm) or reads it over rdma.",
        ("transport",),
    ),
    MetricFamily(
        "hits_total", "Blocks asked for and found, in memory or on the disk alone.", ("tier",)
    ),
    MetricFamily(
        "misses_total",
        "Blocks asked for that the memory did not have, or neither it nor the disk (disk), or that "
        "follow one that was nowhere.",
        ("tier",),
    ),
    MetricFamily(
        "evictions_total",
        "Blocks that went: for want of room (capacity), deleted by a client, which one does "
        "whose digest of a block does not match, or purged.",
        ("reason",),
    ),
    MetricFamily("puts_total", "Requests that committed blocks, in full or in part."),
    MetricFamily("commits_total", "Parts of blocks committed."),
    MetricFamily(
        "posts_total",
        "Parts that clients on this host put without a request: stored, there already (exists), "
        "or refused for breaking a rule.",
        ("outcome",),
    ),
    MetricFamily("aborts_total", "Parts of blocks whose writer gave them up."),
    MetricFamily(
        "no_space_total", "Requests to write for which eviction did not make enough room."
    ),
    MetricFamily("corrupt_total", "Blocks not stored, or dropped, since their digest was wrong."),
    MetricFamily("fenced_total", "Slots that had to be fenced when their connection ended."),
    MetricFamily(
        "expired_reservations_total",
        "Reservations that ended because their connection said nothing for --reserve-timeout.",
    ),
    MetricFamily(
        "client_limited_total",
        "Requests to write that were cut short because their client had --reserve-limit of the "
        "pool.",
    ),
    MetricFamily(
        "landings_total",
        "Waits for a prefix that ended: landed, timeout, cancelled, or gone with their connection.",
        ("outcome",),
    ),
    MetricFamily("landing_wait_ns", "Time that waits which landed took; at once counts too."),
    MetricFamily(
        "operation_ns",
        "Time that the server spent on requests of each kind, with the payload of a put and "
        "without the sending of replies; the count is that of the requests.",
        ("operation",),
    ),
    MetricFamily(
        "attaches_total",
        "Connections that wished for RDMA: attached, refused for want of a queue pair, or gone "
        "before the answer.",
        ("outcome",),
    ),
    MetricFamily(
        "broken_attachments_total",
        "Connections over RDMA that ended in the midst of a put or a get.",
    ),
    MetricFamily("refusals_total", "Times that an engine said that it shares nothing."),
    MetricFamily("bad_frames_total", "Connections ended for breaking the protocol."),
    MetricFamily("unauthorized_total", "Clients and HTTP requests without a token of the node."),
    MetricFamily("tls_failures_total", "Connections ended since TLS failed; certificates, mostly."),
    MetricFamily("stalled_total", "Connections ended for being too slow."),
    MetricFamily("disk_bytes", "Size of the SSD tier."),
    MetricFamily(
        "disk_used_bytes", "Bytes of it that blocks have, or that are not free again yet."
    ),
    MetricFamily("disk_blocks", "Blocks on the disk or being written to it."),
    MetricFamily("disk_durable_blocks", "Blocks on the disk that a restart finds again."),
    MetricFamily("disk_journal_bytes", "Size of the disk's index."),
    MetricFamily("disk_queue", "Parts of blocks that are to be written to the disk."),
    MetricFamily("disk_reads", "Parts of blocks that are being read from the disk."),
    MetricFamily(
        "disk_bypassed",
        "1 while the disk is not used: full, read_errors, write_errors, slow, or its index cannot "
        "be written (journal).",
        ("reason",),
    ),
    MetricFamily(
        "disk_bypasses_total",
        "Times that the disk was put aside: full, read_errors, write_errors, slow or journal.",
        ("reason",),
    ),
    MetricFamily("disk_written_bytes_total", "Bytes of blocks written to the disk."),
    MetricFamily("disk_read_bytes_total", "Bytes of blocks read from the disk."),
    MetricFamily("disk_stored_total", "Parts of blocks recorded as lying on the disk."),
    MetricFamily("disk_promoted_total", "Parts of blocks brought from the disk into memory."),
    MetricFamily("disk_promotion_ns", "Time from when a part was wanted until it was in memory."),
    MetricFamily(
        "disk_skipped_total",
        "Parts of blocks not written: too many waited (queue_full), the block went before its turn "
        "(gone), there was no_room on the disk, or it was bypassed.",
        ("reason",),
    ),
    MetricFamily(
        "disk_errors_total",
        "Operations that failed: read, write, sync, of the index (journal), or bytes read that are "
        "not those that were written (corrupt).",
        ("kind",),
    ),
    MetricFamily(
        "disk_dropped_total",
        "Blocks forgotten since they could not be read or were corrupt; none of them was served.",
    ),
    MetricFamily(
        "disk_evictions_total",
        "Blocks that went from the disk: for want of room (capacity) or deleted by a client.",
        ("reason",),
    ),
    MetricFamily("disk_parked_total", "Requests that waited for blocks from the disk."),
    MetricFamily(
        "disk_late_total",
        "Of these, those answered with what was in memory when --disk-read-timeout had passed.",
    ),
    MetricFamily(
        "disk_announced_total", "Prefixes brought from the disk since a router announced them."
    ),
)
# Of a node with tokens alone; by the names that its file of tokens gives.
TENANT_FAMILIES: Final = (
    MetricFamily(
        "tenant_quota_bytes", "What a tenant can count on; of those with a quota.", TENANT
    ),
    MetricFamily("tenant_used_bytes", "Bytes of the pool that blocks of the tenant have.", TENANT),
    MetricFamily(
        "tenant_held_bytes",
        "Bytes of blocks of the tenant that cannot go: leased, being sent or written, or before "
        "such a block in its chain. Counted where there are several tenants.",
        TENANT,
    ),
    MetricFamily("tenant_blocks", "Blocks of the tenant, matchable or being written.", TENANT),
    MetricFamily("tenant_connections", "Connections that showed the tenant's token.", TENANT),
    MetricFamily(
        "tenant_evictions_total", "Blocks of the tenant that went for want of room.", TENANT
    ),
    MetricFamily("tenant_hits_total", "Blocks that the tenant asked for and found.", TENANT),
    MetricFamily(
        "tenant_misses_total", "Blocks that the tenant asked for and did not find.", TENANT
    ),
    MetricFamily(
        "tenant_limited_total",
        "Requests that were refused, or landed without their lease, for a limit of the tenant.",
        TENANT,
    ),
)
SHARING_REFUSED: Final = MetricFamily(
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


def _bound(ns: str) -> str:
    return "+Inf" if ns == "inf" else str(int(ns) / NS_PER_S)
