// Preloaded into InfiniStore's server, which does not start without an RDMA device: one device by
// the name that it looks for. Registering memory does nothing; blocks can travel over TCP only.
#include <infiniband/verbs.h>
#include <stdlib.h>

#undef ibv_query_port
#undef ibv_reg_mr

static struct ibv_device device;
static struct ibv_device *devices[2] = {&device, NULL};
static struct ibv_context context;
static struct ibv_pd domain;

struct ibv_device **ibv_get_device_list(int *count) {
  if (count) *count = 1;
  return devices;
}

void ibv_free_device_list(struct ibv_device **list) { (void)list; }

const char *ibv_get_device_name(struct ibv_device *which) {
  (void)which;
  return "mlx5_1";
}

struct ibv_context *ibv_open_device(struct ibv_device *which) {
  (void)which;
  return &context;
}

int ibv_close_device(struct ibv_context *which) {
  (void)which;
  return 0;
}

int ibv_query_port(struct ibv_context *which, uint8_t port, struct _compat_ibv_port_attr *out) {
  struct ibv_port_attr *attributes = (struct ibv_port_attr *)out;
  (void)which;
  (void)port;
  attributes->state = IBV_PORT_ACTIVE;
  attributes->active_mtu = IBV_MTU_4096;
  attributes->link_layer = IBV_LINK_LAYER_INFINIBAND;
  attributes->lid = 1;
  return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *which) {
  (void)which;
  return &domain;
}

int ibv_dealloc_pd(struct ibv_pd *which) {
  (void)which;
  return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *memory, size_t bytes, int access) {
  struct ibv_mr *region = calloc(1, sizeof *region);
  (void)access;
  if (!region) return NULL;
  region->pd = pd;
  region->addr = memory;
  region->length = bytes;
  region->lkey = region->rkey = 1;
  return region;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *memory, size_t bytes, uint64_t iova,
                                unsigned access) {
  (void)iova;
  return ibv_reg_mr(pd, memory, bytes, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *region) {
  free(region);
  return 0;
}
