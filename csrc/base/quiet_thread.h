// A thread that blocks all signals: the owner of the process handles them.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace kv {

template <class Body> std::thread quiet_thread(Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Body>(body));  // inherits the mask
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace kv
