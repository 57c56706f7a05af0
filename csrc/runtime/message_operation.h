// A point-to-point send or receive: one transfer.
#pragma once

#include "runtime/communicator.h"
#include "runtime/pending_operation.h"
#include "runtime/scheduled_operation.h"
#include "runtime/transfer.h"

namespace trainmover {

class MessageOperation final : public PendingOperation, private TransferListener {
 public:
  MessageOperation(Engine& engine, Buffer buffer, int peer, std::int64_t tag, bool is_send) : PendingOperation(engine) {
    transfer_.message_class = FrameClass::kPointToPoint;
    transfer_.is_send = is_send;
    transfer_.peer = peer;
    transfer_.key = static_cast<std::uint64_t>(tag);
    transfer_.data = buffer.data;
    transfer_.bytes = buffer.bytes;
    transfer_.exact = false;
    transfer_.listener = this;
  }

  Transfer& transfer() { return transfer_; }
  bool advance() override { return ended_; }
  bool waitsFor(int group_rank) const override { return transfer_.peer == group_rank || transfer_.peer == kAnySource; }

 private:
  void transferEnded(Transfer& transfer) override {
    ended_ = true;
    source_rank_ = transfer.peer;
    received_bytes_ = transfer.bytes;
  }

  Transfer transfer_;
  bool ended_ = false;
};

}  // namespace trainmover
