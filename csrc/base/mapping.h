// Shared memory that has no name: a memfd, mapped. It is gone when the last process that maps it is, however that ends.
#pragma once

#include <cstddef>

#include "base/descriptor.h"

namespace trainmover {

class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  /// A new one of `bytes` zeros, with its descriptor in `fd` to be passed on. Throws TransportError.
  static Mapping create(const char* label, std::size_t bytes, Descriptor& fd);
  /// Maps what another process created; `fd` may be closed afterwards. Throws TransportError when it is not a sealed
  /// memory file of exactly `bytes`, so that a peer can neither shrink it under us nor hand us something else.
  static Mapping attach(const Descriptor& fd, std::size_t bytes);

  void* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  Mapping(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace trainmover
