// A thread that blocks all signals: the owner of the process handles them.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace kv {

// std::system_error if the system has no room for one more.
template <class Body> std::thread quiet_thread(Body&& body) {
  struct AllBlocked {
    AllBlocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~AllBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const AllBlocked inherited;
  return std::thread(std::forward<Body>(body));
}

}  // namespace kv
