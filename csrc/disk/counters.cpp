#include "disk/counters.h"

namespace kv {

void add_disk_stats(StatList& list, const DiskGauges& gauges, const DiskCounters& c) {
  list.add("disk_bytes", gauges.bytes)
      .add("disk_used_bytes", gauges.used_bytes)
      .add("disk_blocks", gauges.blocks)
      .add("disk_durable_blocks", gauges.durable_blocks)
      .add("disk_journal_bytes", gauges.journal_bytes)
      .add("disk_queue", gauges.queue)
      .add("disk_reads", gauges.reads)
      .add_each("disk_bypassed", kDiskFaultNames, gauges.bypassed.values)
      .add_each("disk_bypasses_total", kDiskFaultNames, c.bypasses.values)
      .add("disk_written_bytes_total", c.written_bytes)
      .add("disk_read_bytes_total", c.read_bytes)
      .add("disk_stored_total", c.stored)
      .add("disk_promoted_total", c.promoted)
      .add_each("disk_skipped_total", kDiskSkipNames, c.skipped.values)
      .add_each("disk_errors_total", kDiskErrorNames, c.errors.values)
      .add("disk_dropped_total", c.dropped)
      .add_each("disk_evictions_total", std::array<const char*, 2>{"capacity", "deleted"},
                std::array<uint64_t, 2>{gauges.evictions, c.deleted})
      .add("disk_parked_total", c.parked)
      .add("disk_late_total", c.late)
      .add("disk_announced_total", c.announced)
      .add_times("disk_promotion_ns", c.promotions);
}

}  // namespace kv
