#include "check.h"
#include "table/counters.h"

namespace {

using namespace kv;

constexpr std::array<uint64_t, 2> kBounds{10, 100};

void a_time_falls_into_the_first_bucket_that_holds_it() {
  Histogram<kBounds> times;
  for (const uint64_t ns : {0u, 10u, 11u, 100u, 101u, 5000u}) times.observe(ns);
  CHECK((times.counts() == std::array<uint64_t, 3>{2, 2, 2}));
  CHECK(times.sum_ns() == 5222);
}

void times_are_reported_as_prometheus_counts_them() {
  Histogram<kBounds> times;
  for (const uint64_t ns : {5u, 50u, 500u}) times.observe(ns);
  const StatList::Values expected{
      {"t_ns.le_10", 1}, {"t_ns.le_100", 2}, {"t_ns.le_inf", 3}, {"t_ns.sum", 555}};
  CHECK(StatList().add_times("t_ns", times).take() == expected);
}

void a_name_with_series_is_their_sum() {
  CountsBy<Transport, kTransportNames.size()> bytes;
  bytes[Transport::kShm] += 1, bytes[Transport::kTcp] += 4;
  const StatList::Values expected{
      {"b", 5}, {"b.shm", 1}, {"b.unix", 0}, {"b.tcp", 4}, {"b.rdma", 0}};
  CHECK(StatList().add_each("b", kTransportNames, bytes.values).take() == expected);
}

void every_op_has_a_name_in_its_place() {
  Counters counters;
  counters.operation(wire::Op::kPut).observe(1);
  const size_t put = static_cast<size_t>(wire::Op::kPut) - 1;
  CHECK(counters.operations[put].sum_ns() == 1 && std::string(kOpNames[put]) == "put");
  CHECK(std::string(kOpNames[static_cast<size_t>(wire::Op::kHello) - 1]) == "hello");
  CHECK(std::string(kOpNames[static_cast<size_t>(wire::Op::kHeld) - 1]) == "held");
}

}  // namespace

int main() {
  a_time_falls_into_the_first_bucket_that_holds_it();
  times_are_reported_as_prometheus_counts_them();
  a_name_with_series_is_their_sum();
  every_op_has_a_name_in_its_place();
}
