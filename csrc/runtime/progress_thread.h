// The thread that drives operations while nobody waits for any, and runs what must not run on the control plane's
// thread (it may take the interpreter's lock, and heartbeats must never wait for that).
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "base/descriptor.h"
#include "runtime/engine.h"

namespace trainmover {

class ProgressThread {
 public:
  explicit ProgressThread(Engine& engine);
  ~ProgressThread() { stop(); }

  /// Looks once, soon. Any thread; never blocks.
  void poke();
  /// Runs `work` on the thread, no lock held.
  void later(std::function<void()> work);
  /// Ends the thread after what was given to later() is done. Idempotent.
  void stop();

 private:
  void run();
  void arm();
  bool runLater();

  Engine& engine_;
  Descriptor events_;
  Descriptor wake_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::vector<std::function<void()>> later_;
  std::thread thread_;
};

}  // namespace trainmover
