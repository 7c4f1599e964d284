"""The metrics of a store node: each with its name, help and labels here and nowhere else.

Values are stats. docs/metrics.md lists them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.core import HistogramMetricFamily, Metric

from kvrouter_store.tiers.guard import Guard

NS_PER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. Its help names the values of its labels where they are few.

    stat: its name in the node's stats. The ending decides the kind: `_total` a counter, `_ns` a
        histogram of times, anything else a gauge.
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
        if self.kind == "histogram":
            return f"kvstore:{self.stat.removesuffix('_ns')}_seconds"
        return f"kvstore:{self.stat}"

    def empty(self) -> Metric:
        """The family without samples."""
        return Metric(self.name.removesuffix("_total"), self.help, self.kind)

    def metric(self, values: Mapping[str, int]) -> Metric:
        """The family with its samples; `values` by series, "" where it has no labels."""
        if self.kind == "histogram":
            return self._histogram(values)
        family = self.empty()
        for series, value in values.items():
            if bool(series) == bool(self.labels):  # no sum beside the series
                family.add_sample(self.name, dict.fromkeys(self.labels, series), value)
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


# The help of each metric by its stat, with its label in braces.
HELPS: Final = {
    "pool_bytes": "Size of the pool.",
    "used_bytes": "Bytes of the pool that blocks have, committed or being written.",
    "lent_bytes": "Bytes lent in advance to clients on this host, for their next puts.",
    "free_bytes": "Bytes of the pool that no block and no client has.",
    "page_bytes{pages}": "Size of the pool's pages: explicit (huge, set aside by the host), "
    "transparent (huge, made by the kernel) or small; 0 for the other kinds.",
    "numa_used_bytes{numa_node}": "Used bytes in the memory of each NUMA node (0, 1 and so on); "
    "any: of a pool that is bound to none.",
    "blocks": "Blocks that can be matched or are being written.",
    "reserved_blocks": "Parts of blocks that are being written.",
    "fenced_blocks": "Slots whose writer lost its connection, or its reservation by a time-out, "
    "and may still reach them. They are out of use until it has unmapped the pool, its queue pair "
    "has ended, or it commits or aborts them.",
    "fenced_bytes": "Bytes of these slots.",
    "pinned_blocks": "Blocks that the node keeps for readers: leased, being sent, or read in place "
    "when it wanted to evict them.",
    "leases": "Leases held.",
    "leased_blocks": "Blocks under leases; one under two counts twice.",
    "waits": "Requests that wait for a prefix to land.",
    "connections{transport}": "Connections, by how they move blocks: shm, unix, tcp or rdma.",
    "queue_pairs": "Queue pairs that connections have or wait for, or that have to end.",
    "draining": "1 while the node lets requests in flight end before it stops, else 0.",
    "tiered": "1 if the node has a --tier, else 0.",
    "manifests": "Manifests registered since the node started.",
    "connections_total": "Connections accepted.",
    "rejected_connections_total": "Connections ended because there were too many: new ones, or "
    "ones that said no HELLO or nothing for a second.",
    "bytes_in_total{transport}": "Bytes of blocks committed over shm, unix, tcp or rdma.",
    "bytes_out_total{transport}": "Bytes of blocks given to readers: sent over unix or tcp, leased "
    "to clients that map the pool (shm) or read it over rdma.",
    "hits_total{tier}": "Blocks asked for and found, in memory, on the disk alone, or in a --tier "
    "(remote).",
    "misses_total{tier}": "Blocks asked for and not in memory, or neither in memory nor on the "
    "disk (disk), also not in a --tier (remote), or behind such a block.",
    "evictions_total{reason}": "Blocks removed: to make room (capacity), deleted by a client (also "
    "because their digest was wrong), or purged.",
    "puts_total": "Requests that committed blocks, in full or in part.",
    "commits_total": "Parts of blocks committed.",
    "posts_total{outcome}": "Parts that clients on this host put without a request: stored, there "
    "already (exists), or refused for breaking a rule.",
    "aborts_total": "Parts of blocks whose writer gave them up.",
    "no_space_total": "Requests to write for which eviction did not make enough room.",
    "corrupt_total": "Blocks that came over TCP or the Unix socket with a wrong digest; the node "
    "refused them.",
    "fenced_total": "Slots that had to be fenced when their connection ended.",
    "expired_reservations_total": "Reservations that ended because their connection sent nothing "
    "for --reserve-timeout.",
    "client_limited_total": "Requests to write that were cut short because their client had "
    "--reserve-limit of the pool.",
    "landings_total{outcome}": "Waits for a prefix that ended: landed, timeout, cancelled, or gone "
    "with their connection.",
    "landing_wait_ns": "Time of the waits that landed, also of those that landed at once.",
    "operation_ns{operation}": "Time that the server spent on requests of each kind, with the "
    "payload of a put and without the sending of replies. The count is that of the requests.",
    "attaches_total{outcome}": "Connections that asked for RDMA: attached, refused for lack of a "
    "queue pair, or gone before the answer.",
    "broken_attachments_total": "Connections over RDMA that ended during a put or a get.",
    "refusals_total": "Times that an engine reported that it shares nothing.",
    "bad_frames_total": "Connections ended for breaking the protocol.",
    "unauthorized_total": "Clients and HTTP requests without a token of the node.",
    "tls_failures_total": "Connections ended because TLS failed, mostly over certificates.",
    "stalled_total": "Connections ended for being too slow.",
    "disk_bytes": "Size of the SSD tier.",
    "disk_used_bytes": "Bytes of the SSD tier that blocks have, or that are not free again yet.",
    "disk_blocks": "Blocks on the disk or being written to it.",
    "disk_durable_blocks": "Blocks on the disk that a restart finds again.",
    "disk_journal_bytes": "Size of the disk's index.",
    "disk_queue": "Parts of blocks that are to be written to the disk.",
    "disk_reads": "Parts of blocks that are being read from the disk.",
    "disk_bypassed{reason}": "1 while the disk is not used: full, read_errors, write_errors, "
    "sync_errors, slow, or its index cannot be written (journal).",
    "disk_bypasses_total{reason}": "Times that the node stopped using the disk: full, read_errors, "
    "write_errors, sync_errors, slow or journal.",
    "disk_written_bytes_total": "Bytes of blocks written to the disk.",
    "disk_read_bytes_total": "Bytes of blocks read from the disk.",
    "disk_stored_total": "Parts of blocks recorded as stored on the disk.",
    "disk_promoted_total": "Parts of blocks brought from the disk into memory.",
    "disk_promotion_ns": "Time from the request for a part until it was in memory.",
    "disk_skipped_total{reason}": "Parts of blocks not written: too many waited (queue_full), the "
    "block was removed before its turn (gone), there was no_room on the disk, it was "
    "bypassed, or the write or its sync failed.",
    "disk_errors_total{kind}": "Operations that failed: read, write, sync, of the index (journal), "
    "or a read whose bytes do not match the digest of the put (corrupt).",
    "disk_dropped_total": "Blocks forgotten because they could not be read or were corrupt. None "
    "of them was served.",
    "disk_evictions_total{reason}": "Blocks removed from the disk: to make room (capacity) or "
    "deleted by a client.",
    "disk_parked_total": "Requests that waited for blocks from the disk.",
    "disk_late_total": "Of these, requests answered from memory alone when --disk-read-timeout had "
    "passed.",
    "disk_announced_total": "Prefixes brought from the disk because a router announced them.",
}
# Only of a node with tokens; tenants have the names in its file of tokens.
TENANT_HELPS: Final = {
    "tenant_quota_bytes{tenant}": "What a tenant can count on; of tenants with a quota.",
    "tenant_used_bytes{tenant}": "Bytes of the pool that blocks of the tenant have.",
    "tenant_held_bytes{tenant}": "Bytes of blocks of the tenant that cannot be evicted: leased, "
    "being sent or written, or before such a block in its chain. Counted where there are several "
    "tenants.",
    "tenant_blocks{tenant}": "Blocks of the tenant, matchable or being written.",
    "tenant_connections{tenant}": "Connections with the tenant's token.",
    "tenant_evictions_total{tenant}": "Blocks of the tenant evicted to make room.",
    "tenant_hits_total{tenant}": "Blocks that the tenant asked for and found.",
    "tenant_misses_total{tenant}": "Blocks that the tenant asked for and did not find.",
    "tenant_limited_total{tenant}": "Requests that were refused, or landed without their lease, "
    "for a limit of the tenant.",
}


def _families(helps: Mapping[str, str]) -> tuple[MetricFamily, ...]:
    found = []
    for key, text in helps.items():
        stat, _, label = key.removesuffix("}").partition("{")
        found.append(MetricFamily(stat, text, (label,) if label else ()))
    return tuple(found)


FAMILIES: Final = _families(HELPS)
TENANT_FAMILIES: Final = _families(TENANT_HELPS)
SHARING_REFUSED: Final = MetricFamily(
    "sharing_refused", "Engines that are connected and share nothing.", ("engine", "reason")
)
TIER_UP: Final = MetricFamily("tier_up", "1 while a --tier answers, else 0.", ("tier",))
TIER_VALUES: Final = MetricFamily(
    "tier_values_total",
    "Parts of blocks that went through a --tier, by operation (holds, load, store, drop) and "
    "outcome: ok, missing, failed, falsified (not what was stored; dropped), or skipped while the "
    "tier is away or busy.",
    ("tier", "operation", "outcome"),
)
TIER_BYTES: Final = MetricFamily(
    "tier_bytes_total", "Bytes moved from (load) or to (store) a --tier.", ("tier", "operation")
)
TIER_FAMILIES: Final = (TIER_UP, TIER_VALUES, TIER_BYTES)


def node_metrics(stats: Mapping[str, int]) -> Iterable[Metric]:
    """The families with the values of a node's stats; one without a stat has no samples."""
    values: dict[str, dict[str, int]] = defaultdict(dict)
    for key, value in stats.items():
        stat, _, series = key.partition(".")
        values[stat][series] = value
    families = (
        *FAMILIES,
        *(one for one in (*TENANT_FAMILIES, TIER_UP) if one.stat in values),
    )
    return [family.metric(values[family.stat]) for family in families]


def tier_metrics(tiers: Sequence[Guard]) -> Iterable[Metric]:
    """What the tiers below the node moved; nothing where there are none."""
    if not tiers:
        return []
    values, moved = TIER_VALUES.empty(), TIER_BYTES.empty()
    for tier in tiers:
        for (operation, outcome), count in dict(tier.values).items():
            labels = {"tier": tier.name, "operation": operation, "outcome": outcome}
            values.add_sample(TIER_VALUES.name, labels, count)
        for operation, size in dict(tier.moved).items():
            moved.add_sample(TIER_BYTES.name, {"tier": tier.name, "operation": operation}, size)
    return [values, moved]


def _bound(ns: str) -> str:
    return "+Inf" if ns == "inf" else str(int(ns) / NS_PER_S)
