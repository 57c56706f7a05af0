// Messages over a link: framing, matching by key, flow control. One for each link, whatever the transport.
//
// Short messages are sent at once (eager) and wait in the receiver's memory when nobody has asked for them yet; a
// window bounds that memory. Longer ones are announced; the receiver, once it knows where to put them, fetches them
// from the sender's memory where it may, else grants them and they are streamed. So a message that nobody receives
// never blocks another, and no more than the window is ever buffered.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "runtime/traffic.h"
#include "runtime/transfer.h"
#include "transport/link.h"
#include "wire/frame.h"

namespace trainmover {

/// Bytes, headers included, of eager messages that a receiver may hold for one link.
constexpr std::size_t kEagerWindowBytes = std::size_t{512} << 10;
/// Longer ones are announced where the receiver can then fetch them without a second copy; elsewhere kEagerBytesMax is.
constexpr std::size_t kEagerBesideFetchMax = std::size_t{16} << 10;
/// Announced or buffered messages nobody has asked for; a peer that exceeds it is broken.
constexpr std::size_t kUnexpectedMax = std::size_t{1} << 16;
/// Bytes moved by one call of progress(), so that the engine's lock is never held for long.
constexpr std::size_t kProgressBytesMax = std::size_t{4} << 20;

/// Finds the receive from any source that wants a message nobody asked this channel for; null if there is none.
using AnySourceMatch = std::function<Transfer*(FrameClass, std::uint64_t key)>;

/// All calls under the engine's lock. Throws LinkClosed, FrameError, CollectiveMismatch: the link is then of no use.
class Channel {
 public:
  Channel(std::unique_ptr<Link> link, int peer, std::uint32_t generation, Traffic& traffic, AnySourceMatch any_source);

  void send(Transfer& transfer);
  void receive(Transfer& transfer);
  /// As receive(), but only if a message for it has come already; else nothing is changed.
  bool tryReceive(Transfer& transfer);
  /// Moves what can be moved; true when anything moved.
  bool progress();
  /// True while it matters to somebody here that this link moves.
  bool busy() const { return !ended_ && (!outgoing_.empty() || outstanding_ > 0 || fetch_ != nullptr); }
  /// Frames wait for room; also when nobody here waits for anything.
  bool hasOutgoing() const { return !ended_ && !outgoing_.empty(); }
  /// The peer has closed its end and nothing here needed it; what had come before can still be received.
  bool ended() const { return ended_; }
  /// Transfers of ours that have not ended.
  std::size_t outstanding() const { return outstanding_; }
  /// Low 32 bits of the pair generation that the link bears.
  std::uint32_t generation() const { return generation_; }
  std::size_t unexpectedBytes() const { return unexpected_bytes_; }
  /// The longest message that is sent unannounced.
  std::size_t eagerBytesMax() const { return link_->canReadRemote() ? kEagerBesideFetchMax : kEagerBytesMax; }
  const Link& link() const { return *link_; }

 private:
  struct Outgoing {
    std::array<std::uint8_t, kFrameHeaderBytes> header;
    const void* payload;
    std::size_t payload_bytes;
    std::size_t written;  // of header and payload together
    Transfer* transfer;   // ends when all is written; null for the channel's own frames
  };
  struct Unexpected {
    FrameHeader header;
    std::uint64_t request;                     // id, for kRequest
    std::unique_ptr<unsigned char[]> payload;  // for kEager
  };

  void push(const FrameHeader& header, const void* payload, std::size_t bytes, Transfer* transfer);
  bool flush();
  bool writeAndRead();
  bool readFrames();
  bool matchUnexpected(Transfer& transfer);
  void endPayload();
  void take(const FrameHeader& header);
  void takeEager(const FrameHeader& header);
  void takeRequest(const FrameHeader& header);
  Transfer* takePosted(FrameClass message_class, std::uint64_t key);
  void answerRequest(std::uint64_t id, const FrameHeader& header, Transfer& transfer);
  bool fetch();
  void checkSize(const FrameHeader& header, const Transfer& transfer) const;
  void returnCredit(std::size_t bytes);
  void end(Transfer& transfer);

  std::unique_ptr<Link> link_;
  int peer_;
  std::uint32_t generation_;
  Traffic& traffic_;
  AnySourceMatch any_source_;

  std::deque<Outgoing> outgoing_;
  std::size_t eager_in_flight_ = 0;
  std::uint64_t next_request_ = 0;                         // numbers our requests; the peer counts along
  std::unordered_map<std::uint64_t, Transfer*> requests_;  // ours, not yet granted or fetched

  std::array<std::uint8_t, kFrameHeaderBytes> header_{};
  std::size_t header_bytes_ = 0;
  unsigned char* payload_ = nullptr;  // where the payload under way goes
  std::size_t payload_left_ = 0;
  Transfer* payload_transfer_ = nullptr;  // ends with it; null: it goes to the last of unexpected_
  std::size_t payload_credit_ = 0;

  std::uint64_t seen_requests_ = 0;
  std::vector<Transfer*> posted_;
  std::deque<Unexpected> unexpected_;
  std::unordered_map<std::uint64_t, Transfer*> granted_;
  struct Fetch {
    std::uint64_t request;
    std::uint64_t address;
    Transfer* transfer;
  };
  std::deque<Fetch> fetches_;
  Transfer* fetch_ = nullptr;
  std::size_t credit_ = 0;
  std::size_t unexpected_bytes_ = 0;
  bool ended_ = false, write_closed_ = false;
  std::size_t outstanding_ = 0;  // transfers of ours that have not ended
};

}  // namespace trainmover
