// What stands behind the names of disk/io.h.
#pragma once

#include <memory>

#include "disk/io.h"

namespace kv {

// Null with an errno in `error`; ENOSYS, EPERM and ENOMEM mean that this host has no io_uring for us.
std::unique_ptr<DiskIo> make_disk_io_uring(size_t depth, int& error);
std::unique_ptr<DiskIo> make_disk_io_threads(size_t depth, int& error);

}  // namespace kv
