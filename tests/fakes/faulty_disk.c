// LD_PRELOAD: a disk that fails. It is told how by the file that FAULTY_DISK names, in one line:
//   CALL ERROR FROM COUNT     for example: fdatasync EIO 2 1
// The calls CALL of the SSD tier's files fail with that errno, from the FROM-th on (1 is the first), COUNT times.
// ERROR "short" cuts a write in half. An empty file: all is well. A line that changes begins to count anew.
//
// A sync that fails loses what was written since the last good one, and reports that once, as Linux does
// (https://wiki.postgresql.org/wiki/Fsync_Errors): the old bytes are put back.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(name)*)dlsym(RTLD_NEXT, #name))
#define SHORT (-1)

struct written {
  struct written* before;
  dev_t device;
  ino_t inode;
  off_t offset, size;  // `size`: of the file before
  size_t bytes;
  void* old;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct written* unsynced;
static char last[128];
static int calls;

static int is_ours(const char* path) { return path != NULL && strstr(path, "kvstore.") != NULL; }

static int is_our_file(int fd) {
  char link[64], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  if (is_ours(path)) return 1;
  struct stat status;  // the folder, which is synced after a rename
  return strstr(path, "/disk") != NULL && fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
}

static int errno_of(const char* name) {
  if (strcmp(name, "EIO") == 0) return EIO;
  if (strcmp(name, "ENOSPC") == 0) return ENOSPC;
  if (strcmp(name, "EDQUOT") == 0) return EDQUOT;
  return strcmp(name, "short") == 0 ? SHORT : EINVAL;
}

// What a call is to do instead: 0 (nothing), SHORT or an errno. Under the lock.
static int fault(const char* call) {
  char line[128] = "", wanted[32] = "", error[32] = "";
  int from = 0, count = 0;
  const char* told = getenv("FAULTY_DISK");
  const int fd = told ? REAL(open)(told, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return 0;
  const ssize_t got = REAL(read)(fd, line, sizeof line - 1);
  REAL(close)(fd);
  line[got > 0 ? got : 0] = 0;
  if (strcmp(line, last) != 0) strcpy(last, line), calls = 0;
  if (sscanf(line, "%31s %31s %d %d", wanted, error, &from, &count) != 4) return 0;
  if (strcmp(wanted, call) != 0) return 0;
  ++calls;
  return calls >= from && calls < from + count ? errno_of(error) : 0;
}

static void note(int fd, off_t offset, size_t bytes) {
  struct stat status;
  struct written* one = calloc(1, sizeof *one);
  if (one == NULL || fstat(fd, &status) != 0) abort();
  *one = (struct written){unsynced, status.st_dev, status.st_ino, offset, status.st_size, bytes, NULL};
  if (posix_memalign(&one->old, 4096, (bytes + 4095) / 4096 * 4096) != 0) abort();
  memset(one->old, 0, bytes);
  if (offset < status.st_size && REAL(pread)(fd, one->old, bytes, offset) < 0) abort();
  unsynced = one;
}

// Forgets what was written to a file, after it was put back if the sync failed.
static void settle(int fd, int lose) {
  struct stat status;
  if (fstat(fd, &status) != 0) return;
  for (struct written** at = &unsynced; *at != NULL;) {
    struct written* one = *at;
    if (one->device != status.st_dev || one->inode != status.st_ino) {
      at = &one->before;
      continue;
    }
    if (lose && one->offset < one->size && REAL(pwrite)(fd, one->old, one->bytes, one->offset) < 0) abort();
    if (lose && one->offset + (off_t)one->bytes > one->size && REAL(ftruncate)(fd, one->size) != 0) abort();
    *at = one->before;
    free(one->old);
    free(one);
  }
}

static ssize_t put(const char* call, int fd, const void* data, size_t bytes, off_t offset) {
  const int appends = offset < 0;
  if (!is_our_file(fd)) return appends ? REAL(write)(fd, data, bytes) : REAL(pwrite)(fd, data, bytes, offset);
  pthread_mutex_lock(&lock);
  ssize_t result = -1;
  const int error = fault(call);
  if (error == SHORT && (appends || bytes > 4096)) bytes = appends ? bytes / 2 : bytes / 2 / 4096 * 4096;
  if (error > 0) {
    errno = error;
  } else {
    struct stat status;
    if (appends && fstat(fd, &status) == 0) offset = status.st_size;
    note(fd, offset, bytes);
    result = appends ? REAL(write)(fd, data, bytes) : REAL(pwrite)(fd, data, bytes, offset);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

ssize_t write(int fd, const void* data, size_t bytes) { return put("write", fd, data, bytes, -1); }
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) { return put("pwrite", fd, data, bytes, at); }
ssize_t pwrite64(int fd, const void* data, size_t bytes, off_t at) { return put("pwrite", fd, data, bytes, at); }

static int sync_with(const char* call, int fd, int (*real)(int)) {
  if (!is_our_file(fd)) return real(fd);
  pthread_mutex_lock(&lock);
  const int error = fault(call);
  int result = error != 0 ? -1 : real(fd);
  if (error != 0) errno = error;
  const int why = errno;
  settle(fd, result != 0);
  errno = why;
  pthread_mutex_unlock(&lock);
  return result;
}

int fdatasync(int fd) { return sync_with("fdatasync", fd, REAL(fdatasync)); }
int fsync(int fd) { return sync_with("fsync", fd, REAL(fsync)); }

static int fails(const char* call, int ours) {
  if (!ours) return 0;
  pthread_mutex_lock(&lock);
  const int error = fault(call);
  pthread_mutex_unlock(&lock);
  errno = error;
  return error != 0;
}

int ftruncate(int fd, off_t size) {
  return fails("ftruncate", is_our_file(fd)) ? -1 : REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int fallocate(int fd, int mode, off_t at, off_t size) {
  return fails("fallocate", is_our_file(fd)) ? -1 : REAL(fallocate)(fd, mode, at, size);
}
int fallocate64(int fd, int mode, off_t at, off_t size) { return fallocate(fd, mode, at, size); }
int rename(const char* from, const char* to) { return fails("rename", is_ours(to)) ? -1 : REAL(rename)(from, to); }
int unlink(const char* path) { return fails("unlink", is_ours(path)) ? -1 : REAL(unlink)(path); }
