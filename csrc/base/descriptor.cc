#include "base/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace trainmover {
namespace {

// One bit for each descriptor of ours. A forked child may only call async-signal-safe functions, so no container here.
constexpr int kDescriptorsMax = 1 << 16;
std::atomic<std::uint64_t> g_open[kDescriptorsMax / 64];

void closeAllInChild() {
  for (int word = 0; word < kDescriptorsMax / 64; ++word) {
    std::uint64_t bits = g_open[word].exchange(0, std::memory_order_relaxed);
    while (bits != 0) {
      ::close(word * 64 + __builtin_ctzll(bits));
      bits &= bits - 1;
    }
  }
}

/// False when it was closed already: in a forked child, by the handler above.
bool note(int fd, bool open) {
  static const int registered = pthread_atfork(nullptr, nullptr, closeAllInChild);
  (void)registered;
  if (fd < 0 || fd >= kDescriptorsMax) return true;
  const std::uint64_t bit = std::uint64_t{1} << (fd % 64);
  if (!open) return (g_open[fd / 64].fetch_and(~bit, std::memory_order_relaxed) & bit) != 0;
  g_open[fd / 64].fetch_or(bit, std::memory_order_relaxed);
  return true;
}

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd) { note(fd_, true); }

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Descriptor::reset() noexcept {
  if (fd_ < 0) return;
  if (note(fd_, false)) ::close(fd_);
  fd_ = -1;
}

int Descriptor::release() noexcept {
  note(fd_, false);
  return std::exchange(fd_, -1);
}

const char* errorText(int code) { return std::strerror(code); }

}  // namespace trainmover
