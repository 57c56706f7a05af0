// Executes a Schedule (collectives/schedule.h) over the links of a communicator. Knows nothing of any algorithm.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/schedule.h"
#include "runtime/communicator.h"
#include "runtime/pending_operation.h"
#include "runtime/transfer.h"

namespace trainmover {

/// Where an operation's messages go: the communicator.
class Messenger {
 public:
  virtual ~Messenger() = default;
  /// Hands `transfer` to the channel to `transfer.peer`, now or when the link is there.
  virtual void submit(Transfer& transfer) = 0;
};

class ScheduledOperation final : public PendingOperation, private TransferListener {
 public:
  /// `sequence` numbers the collectives of a communicator; with a step's tag it makes the key of a message.
  ScheduledOperation(Engine& engine, Messenger& messenger, Schedule schedule, const CollectiveCall& call, int size,
                     std::uint64_t sequence);

  bool advance() override;
  bool waitsFor(int group_rank) const override;
  std::size_t scratchBytes() const override { return scratch_memory_ ? schedule_.scratch_bytes : 0; }
  /// When the steps are done: a schedule to go on with (all-to-all learns sizes first), or none.
  std::function<bool(Schedule&, const unsigned char* scratch)> next_schedule;

 private:
  void prepare();
  void start(std::uint32_t index);
  void compute(const Step& step);
  void complete(std::uint32_t index);
  void transferEnded(Transfer& transfer) override;
  unsigned char* at(const Region& region);

  Messenger& messenger_;
  Schedule schedule_;
  DataType dtype_;
  ReduceOp op_;
  int size_;
  std::uint64_t sequence_;
  std::uint64_t phase_ = 0;
  std::vector<Buffer> inputs_, outputs_;
  std::unique_ptr<unsigned char[]> scratch_memory_;
  unsigned char* scratch_ = nullptr;
  std::vector<Transfer> transfers_;          // one a step; used by sends and receives
  std::vector<std::uint32_t> missing_;       // steps that a step still waits for
  std::vector<std::uint32_t> successor_at_;  // successors of step i: successors_[successor_at_[i] .. [i + 1])
  std::vector<std::uint32_t> successors_;
  std::vector<std::uint32_t> ready_;
  std::vector<bool> in_flight_;
  std::size_t remaining_ = 0;
  bool prepared_ = false;
};

}  // namespace trainmover
