#!/usr/bin/env bash
# One-sided RDMA on Soft-RoCE, a fleet over it, and InfiniStore as a tier: in pairs of machines emulated by QEMU. Debian's
# kernel, pyverbs and InfiniStore's package are kept outside the checkout.
# Installs the Debian packages qemu-system-x86, busybox-static, cpio, kmod, xz-utils and iproute2 where they are missing.
. "$(dirname "$0")/../lib.sh"
activate_dev
status=0
python -m tests.rdma 2>&1 | tee build/ci/rdma-machines.log || status=$?
[ "$status" != 97 ] || skip "$(sed -n 's/^rdma-machine: //p' build/ci/rdma-machines.log | tail -1)"
exit "$status"
