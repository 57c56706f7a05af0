// See operation_trace.h.
#include "runtime/operation_trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "base/errors.h"

namespace trainmover {
namespace {

constexpr std::uint64_t kStart = 0x9e3779b97f4a7c15;
constexpr std::uint64_t kFactor = 0xd6e8feb86659fd93;  // odd: each step can be undone, so no two words look the same

std::uint64_t step(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * kFactor;
  return hash ^ hash >> 32;
}

std::uint64_t hashOfAll(const std::vector<Buffer>& buffers) {
  std::uint64_t hash = kStart;
  for (const Buffer& buffer : buffers) hash = hashOf(buffer.data, buffer.bytes, hash);
  return hash;
}

std::string hex(std::uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

/// A group's name may hold anything; a line's fields hold no tabs and no ends of lines.
std::string field(std::string text) {
  std::replace_if(text.begin(), text.end(), [](unsigned char byte) { return byte < 0x20; }, '_');
  return text;
}

}  // namespace

std::uint64_t hashOf(const void* data, std::size_t bytes, std::uint64_t hash) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint64_t word = 0;
  std::size_t left = bytes;
  for (; left >= sizeof word; left -= sizeof word, at += sizeof word) {
    std::memcpy(&word, at, sizeof word);
    hash = step(hash, word);
  }
  word = 0;
  if (left > 0) std::memcpy(&word, at, left);
  return step(step(hash, word), bytes);
}

OperationTrace::OperationTrace(const std::string& path) : path_(path + "." + std::to_string(::getpid())) {
  file_ = Descriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!file_) {
    throw TransportError("the trace of operations cannot be written to " + path_ + ": " + errorText(errno) +
                         "; give TRAINMOVER_TRACE a prefix in a folder that can be written, or unset it");
  }
}

std::unique_ptr<TracedOperation> OperationTrace::started(const FlightRecord& facts,
                                                         const std::vector<int>& global_ranks,
                                                         const std::vector<Buffer>& inputs,
                                                         const std::vector<Buffer>& outputs) {
  if (broken_.load(std::memory_order_relaxed)) return nullptr;
  std::string line = std::to_string(facts.record_id) + '\t' + std::to_string(facts.iteration) + '\t' +
                     std::to_string(facts.created_ns) + '\t' + field(facts.communicator) + '\t' + listed(global_ranks) +
                     '\t' + facts.operation + '\t' + std::to_string(facts.peer) + '\t' +
                     std::to_string(facts.input_bytes) + '\t' + std::to_string(facts.output_bytes) + '\t' +
                     hex(hashOfAll(inputs));
  return std::make_unique<TracedOperation>(*this, std::move(line), facts.point_to_point, outputs);
}

void OperationTrace::write(const std::string& line) {
  if (broken_.load(std::memory_order_relaxed)) return;
  const ssize_t written = ::write(file_.get(), line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size()) || broken_.exchange(true)) return;
  std::fprintf(stderr, "trainmover: the trace of operations in %s ends here: %s\n", path_.c_str(),
               written < 0 ? errorText(errno) : "no room for a line");
}

void TracedOperation::ended(std::size_t received_bytes) {
  if (receives_ && !outputs_.empty()) outputs_[0].bytes = std::min(outputs_[0].bytes, received_bytes);
  trace_.write(line_ + '\t' + hex(hashOfAll(outputs_)) + '\t' + std::to_string(wallClockNs()) + '\n');
}

const std::vector<Buffer>& givenTo(const CollectiveCall& call, int rank) {
  static const std::vector<Buffer> kNothing;
  if (!call.inputs.empty()) return call.inputs;
  const bool in_place =
      call.kind == CollectiveKind::kAllReduce || (call.kind == CollectiveKind::kBroadcast && call.root == rank);
  return in_place ? call.outputs : kNothing;
}

}  // namespace trainmover
