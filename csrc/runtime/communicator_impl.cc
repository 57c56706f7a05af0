// Starting and driving operations. What concerns links is in communicator_links.cc, what ends operations before their
// time in communicator_failures.cc.
#include "runtime/communicator_impl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "collectives/all_to_all.h"
#include "collectives/names.h"
#include "collectives/topology.h"
#include "flat/flat_operation.h"
#include "runtime/call_shape.h"
#include "transport/link_closed.h"

namespace trainmover {
namespace {

class FinishedOperation final : public PendingOperation {
 public:
  using PendingOperation::PendingOperation;
  bool advance() override { return true; }
  bool waitsFor(int) const override { return false; }
};

std::size_t totalBytes(const std::vector<Buffer>& buffers) {
  std::size_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes += buffer.bytes;
  return bytes;
}

}  // namespace

// A collective in its queue: becomes an operation over the segment or over links when its turn comes, because which of
// the two it is may not be known before.
class CommunicatorImpl::QueuedCollective final : public PendingOperation {
 public:
  QueuedCollective(CommunicatorImpl& communicator, const CollectiveCall& call, Shape shape)
      : PendingOperation(communicator.engine_), communicator_(communicator), call_(call), shape_(std::move(shape)) {}

  bool advance() override {
    moved = false;
    if (!inner_) {
      is_next_ = true;
      inner_ = communicator_.makeOperation(call_, shape_);
      if (!inner_) return false;
      moved = true;
      if (recorder != nullptr) recorder->update(record, FlightRecord::State::kStarted, wallClockNs());
    }
    const bool done = inner_->advance();
    moved |= inner_->moved;
    return done;
  }
  // Before its group shares memory it waits for all others.
  bool waitsFor(int group_rank) const override { return inner_ ? inner_->waitsFor(group_rank) : is_next_; }
  bool needsMemoryOf(int group_rank) const override { return inner_ && inner_->needsMemoryOf(group_rank); }
  void inspect() override {
    if (inner_) inner_->inspect();
  }
  std::size_t scratchBytes() const override { return inner_ ? inner_->scratchBytes() : 0; }

 private:
  CommunicatorImpl& communicator_;
  CollectiveCall call_;
  Shape shape_;
  bool is_next_ = false;
  std::unique_ptr<PendingOperation> inner_;
};

CommunicatorImpl::CommunicatorImpl(CommunicatorHost& host, CommunicatorConfig config)
    : host_(host), engine_(host.engine()), config_(std::move(config)), channels_(config_.global_ranks.size()) {
  for (int peer = 0; peer < size(); ++peer) group_ranks_[config_.global_ranks[static_cast<std::size_t>(peer)]] = peer;
}

CommunicatorImpl::~CommunicatorImpl() = default;

std::shared_ptr<Operation> CommunicatorImpl::start(const CollectiveCall& call) {
  if (host_.isolated()) {
    fillIsolated(call, size(), rank());
    started_.fetch_add(1, std::memory_order_relaxed);
    return finishedAtOnce();
  }
  Shape shape = shapeOf(call, size(), rank());  // refuses what contradicts itself before anything is queued
  host_.checkUsable();
  auto operation = std::make_shared<QueuedCollective>(*this, call, std::move(shape));
  FlightRecord facts;
  facts.operation = nameOf(call.kind);
  facts.dtype = call.dtype;
  facts.sequence = started_.fetch_add(1, std::memory_order_relaxed);
  facts.input_bytes = totalBytes(call.inputs.empty() ? call.outputs : call.inputs);
  facts.output_bytes = totalBytes(call.outputs);
  record(*operation, facts, call.timeout, givenTo(call, rank()), call.outputs);
  {
    std::lock_guard<std::mutex> lock(engine_.mutex());
    checkOpen();
    collectives_.push_back(operation);
    engine_.activate(shared_from_this());  // here, so that an abort either refuses it above or finds it
    advance();
  }
  handOver(*operation, call.waited_at_once);
  return operation;
}

std::shared_ptr<Operation> CommunicatorImpl::finishedAtOnce() {
  auto finished = std::make_shared<FinishedOperation>(engine_);
  finished->endAtOnce();
  return finished;
}

void CommunicatorImpl::checkOpen() const {
  if (closed_) throw CollectiveAborted(host_.currentGeneration(), -1, "communicator " + config_.name + " was closed");
  host_.checkUsable();
}

std::shared_ptr<Operation> CommunicatorImpl::send(Buffer buffer, int peer, std::int64_t tag,
                                                  std::chrono::milliseconds timeout, bool waited_at_once) {
  return startMessage(buffer, peer, tag, timeout, true, waited_at_once);
}

std::shared_ptr<Operation> CommunicatorImpl::receive(Buffer buffer, int peer, std::int64_t tag,
                                                     std::chrono::milliseconds timeout, bool waited_at_once) {
  return startMessage(buffer, peer, tag, timeout, false, waited_at_once);
}

std::shared_ptr<Operation> CommunicatorImpl::startMessage(Buffer buffer, int peer, std::int64_t tag,
                                                          std::chrono::milliseconds timeout, bool is_send,
                                                          bool waited_at_once) {
  const bool any = peer == kAnySource && !is_send;
  if (!any && (peer < 0 || peer >= size() || peer == rank())) {
    throw std::invalid_argument("found group rank " + std::to_string(peer) + " to " +
                                (is_send ? "send to" : "receive from") + ", expected another rank of the group of " +
                                std::to_string(size()));
  }
  if (host_.isolated()) {
    if (!is_send && buffer.bytes > 0) std::memset(buffer.data, 0, buffer.bytes);
    return finishedAtOnce();
  }
  host_.checkUsable();
  auto operation = std::make_shared<MessageOperation>(engine_, buffer, peer, tag, is_send);
  FlightRecord facts;
  facts.operation = is_send ? "send" : "recv";
  facts.peer = peer;
  facts.point_to_point = true;
  (is_send ? facts.input_bytes : facts.output_bytes) = buffer.bytes;
  const std::vector<Buffer> sent(is_send ? 1 : 0, buffer), received(is_send ? 0 : 1, buffer);
  {
    std::lock_guard<std::mutex> lock(engine_.mutex());
    checkOpen();
    facts.sequence = messages_started_++;
    record(*operation, facts, timeout, sent, received);
    messages_.push_back(operation);
    engine_.activate(shared_from_this());
    try {
      any ? submitAnySource(operation->transfer()) : submit(operation->transfer());
    } catch (const LinkClosed& error) {
      linkBroke(peer, error.what());
    } catch (const CollectiveError& error) {
      failAll(error.what());
    } catch (const std::exception& error) {
      host_.failed(-1, error.what(), false);
    }
    advance();
  }
  handOver(*operation, waited_at_once);
  return operation;
}

void CommunicatorImpl::record(PendingOperation& operation, FlightRecord facts, std::chrono::milliseconds timeout,
                              const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs) {
  const auto limit_ms = static_cast<std::uint64_t>((timeout.count() > 0 ? timeout : config_.timeout).count());
  operation.deadline_ms = limit_ms == 0 ? 0 : monotonicMs() + limit_ms;
  operation.description =
      std::string(facts.operation) + " number " + std::to_string(facts.sequence) + " of group " + config_.name;
  facts.communicator = config_.name;
  facts.generation = host_.currentGeneration();
  facts.iteration = host_.iteration();
  facts.timeout_ms = limit_ms;
  facts.created_ns = wallClockNs();
  operation.waits = waits_;
  operation.sleeps = sleeps_.load(std::memory_order_relaxed);
  operation.recorder = &host_.recorder();
  operation.record = operation.recorder->add(facts);
  if (OperationTrace* trace = host_.trace()) {
    facts.record_id = operation.record;
    operation.traced = trace->started(facts, config_.global_ranks, inputs, outputs);
  }
}

// What could be done at once is done; the rest is for whoever waits, or the progress thread.
void CommunicatorImpl::handOver(const PendingOperation& operation, bool waited_at_once) {
  if (operation.finished()) {
    engine_.settle();
  } else {
    engine_.submitted(waited_at_once);
  }
}

std::unique_ptr<PendingOperation> CommunicatorImpl::makeOperation(CollectiveCall& call, const Shape& shape) {
  if (size() > 1 && size() <= flat::kRanksMax && allLocal()) {
    if (!groupReady()) return nullptr;
    if (flat::canServe(*group_, call)) {
      const bool reduce = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduce ||
                          call.kind == CollectiveKind::kReduceScatter;
      const std::uint64_t sequence = ++flat_sequence_;
      return reduce ? flat::makeReduceOperation(engine_, group_, sequence, call)
                    : flat::makePullOperation(engine_, group_, sequence, call);
    }
  }
  return makeScheduled(call, shape);
}

std::unique_ptr<PendingOperation> CommunicatorImpl::makeScheduled(CollectiveCall& call, const Shape& shape) {
  if (call.kind == CollectiveKind::kAllReduce && !call.inputs.empty()) {
    // Schedules of all-reduce work in place.
    const Buffer from = call.inputs[0];
    if (from.data != call.outputs[0].data && from.bytes > 0) {
      std::memmove(call.outputs[0].data, from.data, from.bytes);
    }
    call.inputs.clear();
  }
  const std::uint64_t sequence = ++scheduled_sequence_;
  Messenger& messenger = *this;
  if (call.kind != CollectiveKind::kAllToAll || size() <= kDirectSize) {
    return std::make_unique<ScheduledOperation>(engine_, messenger, buildSchedule(shape), call, size(), sequence);
  }
  // Blocks are forwarded, and each rank knows only its own sizes: the first schedule tells them, the second moves.
  auto own = std::make_shared<std::vector<std::uint64_t>>();
  for (int delta = 0; delta < size(); ++delta) {
    own->push_back(shape.pieces[static_cast<std::size_t>((rank() + delta) % size())]);
  }
  CollectiveCall with_sizes = call;
  with_sizes.inputs.push_back({own->data(), own->size() * sizeof(std::uint64_t)});
  auto operation =
      std::make_unique<ScheduledOperation>(engine_, messenger, buildAllToAllSizes(shape), with_sizes, size(), sequence);
  operation->next_schedule = [shape, own](Schedule& next, const unsigned char* scratch) {
    std::vector<std::uint64_t> sizes(allToAllSizeCount(shape.size));
    std::memcpy(sizes.data(), scratch, sizes.size() * sizeof(std::uint64_t));
    next = buildAllToAllData(shape, sizes);
    return true;
  };
  return operation;
}

bool CommunicatorImpl::advance() {
  if (dead_ || broken_.since_ms != 0) return false;
  try {
    bool moved = advanceChannels();
    moved |= advanceMessages();
    moved |= advanceCollectives();
    return moved;
  } catch (const RankClosed& error) {
    linkBroke(error.groupRank(), error.what());
  } catch (const LinkClosed& error) {
    linkBroke(-1, error.what());
  } catch (const CollectiveError& error) {
    failAll(error.what());
  } catch (const std::exception& error) {
    host_.failed(-1, error.what(), false);
  }
  return false;
}

bool CommunicatorImpl::advanceCollectives() {
  bool moved = false;
  while (!collectives_.empty()) {
    const std::shared_ptr<PendingOperation> front = collectives_.front();
    bool done = false;
    try {
      done = front->advance();
    } catch (const LinkClosed&) {
      throw;
    } catch (const std::exception& error) {
      failFront(front, error.what());
      return true;
    }
    moved |= front->moved;
    if (!done) return moved;
    moved = true;
    collectives_.pop_front();
    front->end(nullptr);
  }
  return moved;
}

bool CommunicatorImpl::advanceMessages() {
  bool moved = false;
  for (std::size_t i = 0; i < messages_.size();) {
    if (!messages_[i]->advance()) {
      ++i;
      continue;
    }
    const std::shared_ptr<MessageOperation> message = messages_[i];
    messages_.erase(messages_.begin() + static_cast<std::ptrdiff_t>(i));
    message->end(nullptr);
    moved = true;
  }
  return moved;
}

bool CommunicatorImpl::outstanding() const {
  if (!collectives_.empty() || !messages_.empty()) return true;
  return std::any_of(linked_.begin(), linked_.end(), [&](int peer) {
    return channels_[static_cast<std::size_t>(peer)]->hasOutgoing();  // somebody else waits for what is in there
  });
}

void CommunicatorImpl::resume() {
  dropLinks();
  dead_ = false;
  left_since_ms_.clear();
  locality_ = Locality::kUnknown;
  started_.store(0, std::memory_order_relaxed);
  messages_started_ = flat_sequence_ = scheduled_sequence_ = 0;
}

}  // namespace trainmover
