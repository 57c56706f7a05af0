#include "base/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/errors.h"

namespace trainmover {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

void* mapShared(int fd, std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    throw TransportError("mapping " + std::to_string(bytes) + " bytes of shared memory failed: " + errorText(errno));
  }
  // A forked helper has no business here: without this it would keep the memory of a dead rank.
  ::madvise(data, bytes, MADV_DONTFORK);
  return data;
}

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Mapping Mapping::create(const char* label, std::size_t bytes, Descriptor& fd) {
  fd = Descriptor(::memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 || ::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    throw TransportError("making " + std::to_string(bytes) + " bytes of shared memory failed: " + errorText(errno));
  }
  return Mapping(mapShared(fd.get(), bytes), bytes);
}

Mapping Mapping::attach(const Descriptor& fd, std::size_t bytes) {
  struct stat facts{};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(fd.get(), &facts) != 0 ||
      static_cast<std::size_t>(facts.st_size) != bytes) {
    throw TransportError("a peer passed a descriptor that is not the sealed memory file of " + std::to_string(bytes) +
                         " bytes that was expected; are all ranks of one version?");
  }
  return Mapping(mapShared(fd.get(), bytes), bytes);
}

}  // namespace trainmover
