// A file descriptor that is closed exactly once, also in a forked child: helpers that a rank forks (data loaders) must
// not keep its connections alive, or its death would go unnoticed (every open one is registered for an atfork handler).
#pragma once

#include <utility>

namespace trainmover {

class Descriptor {
 public:
  Descriptor() = default;
  /// Takes ownership of `fd` (-1: none).
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;
  /// Gives up ownership.
  int release() noexcept;

 private:
  int fd_ = -1;
};

/// Text of errno value `code`.
const char* errorText(int code);

}  // namespace trainmover
