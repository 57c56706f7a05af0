#include "transport/shm/link.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "transport/link_closed.h"

namespace trainmover::shm {
namespace {

// One direction. `written` and `consumed` only grow; each is stored by one side alone.
struct Ring {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> consumed;
  alignas(64) std::atomic<std::uint32_t> writer_waits;  // the writer found no room: ring when some is made
  std::atomic<std::uint32_t> writer_closed;
  std::atomic<std::uint32_t> reader_closed;
  alignas(64) unsigned char bytes[kRingBytes];
};

// How an end lets the other try whether it can be read: the word at `address` in `process` is `value`.
struct Probe {
  alignas(64) std::atomic<std::uint32_t> ready;
  std::int64_t process;
  std::uint64_t address, value;
};

struct Segment {
  Ring from_creator;
  Ring to_creator;
  Probe of_creator;
  Probe of_other;
};

class ShmLink final : public Link {
 public:
  ShmLink(Mapping segment, LinkConfig config) : mapping_(std::move(segment)), config_(std::move(config)) {
    auto* rings = static_cast<Segment*>(mapping_.data());
    out_ = config_.creator ? &rings->from_creator : &rings->to_creator;
    in_ = config_.creator ? &rings->to_creator : &rings->from_creator;
    written_ = out_->written.load(std::memory_order_relaxed);
    consumed_ = in_->consumed.load(std::memory_order_relaxed);
    Probe& own = config_.creator ? rings->of_creator : rings->of_other;
    peer_ = config_.creator ? &rings->of_other : &rings->of_creator;
    own.process = ::getpid();
    own.address = reinterpret_cast<std::uint64_t>(&word_);
    own.value = word_ = reinterpret_cast<std::uint64_t>(this) ^ monotonicNs();
    own.ready.store(1, std::memory_order_release);
  }

  // Closing comes before the caller of an aborted send gets its memory back, so that a peer that has just read that
  // memory can tell that what it read may be anything.
  ~ShmLink() override {
    out_->writer_closed.store(1, std::memory_order_seq_cst);
    in_->reader_closed.store(1, std::memory_order_seq_cst);
    config_.ring_peer();
  }

  std::size_t write(const IoSlice* parts, int count) override {
    if (out_->reader_closed.load(std::memory_order_acquire) != 0) throw LinkClosed("closed its end");
    const std::uint64_t unread = written_ - out_->consumed.load(std::memory_order_acquire);
    if (unread > kRingBytes) throw LinkClosed("has broken the ring it reads");
    std::size_t room = kRingBytes - unread;
    std::size_t taken = 0;
    bool all = true;
    for (int i = 0; i < count; ++i) {
      const std::size_t bytes = std::min(parts[i].bytes, room);
      copyIn(parts[i].data, bytes);
      room -= bytes;
      taken += bytes;
      if (bytes < parts[i].bytes) {
        all = false;
        break;
      }
    }
    if (taken > 0) {
      out_->written.store(written_, std::memory_order_release);
      dirty_ = true;
    }
    if (!all) {
      out_->writer_waits.store(1, std::memory_order_seq_cst);
    }
    return taken;
  }

  std::size_t read(void* data, std::size_t bytes) override {
    // The order matters: closed is looked at first, so that what was written before closing is still delivered.
    const bool closed = in_->writer_closed.load(std::memory_order_acquire) != 0;
    const std::size_t there = in_->written.load(std::memory_order_acquire) - consumed_;
    if (there > kRingBytes) throw LinkClosed("has broken the ring it writes");
    if (there == 0) {
      if (closed) throw LinkClosed("closed its end");
      return 0;
    }
    const std::size_t got = std::min(there, bytes);
    copyOut(data, got);
    in_->consumed.store(consumed_, std::memory_order_seq_cst);
    if (in_->writer_waits.load(std::memory_order_seq_cst) != 0) {
      in_->writer_waits.store(0, std::memory_order_seq_cst);
      dirty_ = true;
    }
    return got;
  }

  // Which process the peer is, is tried and not believed: in another process namespace its number names another one.
  bool canReadRemote() const override {
    if (!config_.read_remote) return false;
    if (readable_ == Readable::kUnknown && peer_->ready.load(std::memory_order_acquire) != 0) {
      const bool may = mayReadMemoryOf(peer_->process, peer_->address, peer_->value);
      readable_ = may ? Readable::kYes : Readable::kNo;
    }
    return readable_ == Readable::kYes;
  }

  void readRemote(std::uint64_t address, void* to, std::size_t bytes) override {
    if (!readMemoryOf(peer_->process, address, to, bytes)) throw LinkClosed("its memory cannot be read any more");
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (in_->writer_closed.load(std::memory_order_seq_cst) != 0) throw LinkClosed("took its memory back");
  }

  int descriptor() const override { return -1; }

  bool isClosed() const override {
    return in_->writer_closed.load(std::memory_order_acquire) != 0 ||
           out_->reader_closed.load(std::memory_order_acquire) != 0;
  }

  void notify() override {
    if (!dirty_) return;
    dirty_ = false;
    config_.ring_peer();
  }

  std::size_t heldBytes() const override { return mapping_.bytes(); }
  const char* transport() const override { return "shm"; }

 private:
  void copyIn(const void* data, std::size_t bytes) {
    const std::size_t at = written_ % kRingBytes;
    const std::size_t first = std::min(bytes, kRingBytes - at);
    if (first > 0) std::memcpy(out_->bytes + at, data, first);
    if (bytes > first) std::memcpy(out_->bytes, static_cast<const unsigned char*>(data) + first, bytes - first);
    written_ += bytes;
  }

  void copyOut(void* data, std::size_t bytes) {
    const std::size_t at = consumed_ % kRingBytes;
    const std::size_t first = std::min(bytes, kRingBytes - at);
    std::memcpy(data, in_->bytes + at, first);
    if (bytes > first) std::memcpy(static_cast<unsigned char*>(data) + first, in_->bytes, bytes - first);
    consumed_ += bytes;
  }

  Mapping mapping_;
  LinkConfig config_;
  Ring* out_ = nullptr;
  Ring* in_ = nullptr;
  const Probe* peer_ = nullptr;
  std::uint64_t word_ = 0;
  enum class Readable { kUnknown, kYes, kNo };
  mutable Readable readable_ = Readable::kUnknown;
  std::uint64_t written_ = 0, consumed_ = 0;
  bool dirty_ = false;
};

}  // namespace

std::size_t segmentBytes() { return sizeof(Segment); }

bool readMemoryOf(std::int64_t pid, std::uint64_t address, void* to, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  while (bytes > 0) {
    iovec local{target, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t got = ::process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    target += got;
    address += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool mayReadMemoryOf(std::int64_t pid, std::uint64_t address, std::uint64_t expected) {
  std::uint64_t found = 0;
  return readMemoryOf(pid, address, &found, sizeof found) && found == expected;
}

std::unique_ptr<Link> makeLink(Mapping segment, LinkConfig config) {
  return std::make_unique<ShmLink>(std::move(segment), std::move(config));
}

}  // namespace trainmover::shm
