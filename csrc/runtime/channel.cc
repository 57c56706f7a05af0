#include "runtime/channel.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/errors.h"
#include "transport/link_closed.h"

namespace trainmover {

Channel::Channel(std::unique_ptr<Link> link, int peer, std::uint32_t generation, Traffic& traffic,
                 AnySourceMatch any_source)
    : link_(std::move(link)),
      peer_(peer),
      generation_(generation),
      traffic_(traffic),
      any_source_(std::move(any_source)) {
  link_->activate();
}

void Channel::send(Transfer& transfer) {
  if (ended_) throw LinkClosed("has left");
  ++outstanding_;
  FrameHeader header;
  header.message_class = transfer.message_class;
  header.key = transfer.key;
  header.bytes = transfer.bytes;
  const std::size_t weight = transfer.bytes + kFrameHeaderBytes;
  if (transfer.bytes <= eagerBytesMax() && eager_in_flight_ + weight <= kEagerWindowBytes) {
    eager_in_flight_ += weight;
    header.kind = FrameKind::kEager;
    push(header, transfer.data, transfer.bytes, &transfer);
  } else {
    header.kind = FrameKind::kRequest;
    header.address = link_->canReadRemote() ? reinterpret_cast<std::uint64_t>(transfer.data) : 0;
    requests_.emplace(next_request_++, &transfer);
    push(header, nullptr, 0, nullptr);
  }
  flush();
  link_->notify();
}

void Channel::receive(Transfer& transfer) {
  if (tryReceive(transfer)) return;
  if (ended_) throw LinkClosed("has left");
  ++outstanding_;
  posted_.push_back(&transfer);
}

bool Channel::tryReceive(Transfer& transfer) {
  ++outstanding_;
  if (matchUnexpected(transfer)) return true;
  --outstanding_;
  return false;
}

bool Channel::matchUnexpected(Transfer& transfer) {
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
    return message.header.message_class == transfer.message_class && message.header.key == transfer.key;
  });
  if (found == unexpected_.end()) return false;
  // The payload of the newest one may still be on its way.
  if (payload_left_ > 0 && payload_transfer_ == nullptr && &*found == &unexpected_.back()) return false;
  Unexpected message = std::move(*found);
  unexpected_.erase(found);
  checkSize(message.header, transfer);
  transfer.peer = peer_;
  if (message.header.kind == FrameKind::kRequest) {
    answerRequest(message.request, message.header, transfer);
    flush();
    link_->notify();
    return true;
  }
  const std::size_t bytes = message.header.bytes;
  unexpected_bytes_ -= bytes;
  transfer.bytes = bytes;
  if (bytes > 0) std::memcpy(transfer.data, message.payload.get(), bytes);
  returnCredit(bytes + kFrameHeaderBytes);
  if (hasOutgoing()) {
    flush();
    link_->notify();
  }
  end(transfer);
  return true;
}

// A peer that has left cannot be written to, but what it sent before still counts; and if nothing here waits for it,
// its leaving concerns nobody.
bool Channel::progress() {
  if (ended_) return false;
  try {
    return writeAndRead();
  } catch (const LinkClosed&) {
    if (outstanding_ > 0) throw;
    ended_ = true;
    outgoing_.clear();
    return true;
  }
}

bool Channel::writeAndRead() {
  bool moved = flush();
  moved |= readFrames();
  moved |= fetch();
  moved |= flush();
  link_->notify();
  return moved;
}

void Channel::push(const FrameHeader& header, const void* payload, std::size_t bytes, Transfer* transfer) {
  FrameHeader stamped = header;
  stamped.generation = generation_;
  outgoing_.push_back({encode(stamped), payload, bytes, 0, transfer});
}

bool Channel::flush() {
  std::size_t moved = 0;
  while (!outgoing_.empty() && !write_closed_ && moved < kProgressBytesMax) {
    Outgoing& frame = outgoing_.front();
    const std::size_t total = kFrameHeaderBytes + frame.payload_bytes;
    const std::size_t header_left = frame.written < kFrameHeaderBytes ? kFrameHeaderBytes - frame.written : 0;
    const std::size_t payload_done = frame.written > kFrameHeaderBytes ? frame.written - kFrameHeaderBytes : 0;
    const IoSlice parts[2] = {{frame.header.data() + kFrameHeaderBytes - header_left, header_left},
                              {static_cast<const unsigned char*>(frame.payload) + payload_done,
                               std::min(frame.payload_bytes - payload_done, kProgressBytesMax)}};
    std::size_t written = 0;
    try {
      written = link_->write(parts, frame.payload_bytes == payload_done ? 1 : 2);
    } catch (const LinkClosed&) {
      write_closed_ = true;  // reading goes on, and throws after the last byte that came
      break;
    }
    if (written == 0) break;
    moved += written;
    traffic_.bytes_sent += written;
    frame.written += written;
    if (frame.written < total) continue;
    Transfer* transfer = frame.transfer;
    outgoing_.pop_front();
    if (transfer != nullptr) end(*transfer);
  }
  return moved > 0;
}

bool Channel::readFrames() {
  std::size_t moved = 0;
  while (moved < kProgressBytesMax) {
    if (payload_left_ > 0) {
      const std::size_t got = link_->read(payload_, std::min(payload_left_, kProgressBytesMax));
      if (got == 0) break;
      moved += got;
      payload_ += got;
      payload_left_ -= got;
      if (payload_left_ > 0) continue;
      endPayload();
      continue;
    }
    const std::size_t got = link_->read(header_.data() + header_bytes_, kFrameHeaderBytes - header_bytes_);
    if (got == 0) break;
    moved += got;
    header_bytes_ += got;
    if (header_bytes_ < kFrameHeaderBytes) continue;
    header_bytes_ = 0;
    take(decode(header_.data()));
  }
  traffic_.bytes_received += moved;
  return moved > 0;
}

// The payload under way is whole.
void Channel::endPayload() {
  if (payload_credit_ > 0) returnCredit(std::exchange(payload_credit_, 0));
  if (payload_transfer_ != nullptr) return end(*std::exchange(payload_transfer_, nullptr));
  // A receive may have been posted while the message came in.
  const FrameHeader header = unexpected_.back().header;
  Transfer* transfer = takePosted(header.message_class, header.key);
  if (transfer != nullptr) matchUnexpected(*transfer);
}

void Channel::take(const FrameHeader& header) {
  if (header.generation != generation_) {
    throw FrameError("a frame of generation " + std::to_string(header.generation) + " came over a link of generation " +
                     std::to_string(generation_));
  }
  switch (header.kind) {
    case FrameKind::kEager:
      return takeEager(header);
    case FrameKind::kRequest:
      return takeRequest(header);
    case FrameKind::kGrant: {
      const auto found = requests_.find(header.key);
      if (found == requests_.end()) throw FrameError("a grant for a message that was never announced");
      Transfer* transfer = found->second;
      requests_.erase(found);
      FrameHeader data;
      data.kind = FrameKind::kData;
      data.key = header.key;
      data.bytes = transfer->bytes;
      return push(data, transfer->data, transfer->bytes, transfer);
    }
    case FrameKind::kData: {
      const auto found = granted_.find(header.key);
      if (found == granted_.end() || found->second->bytes != header.bytes) {
        throw FrameError("payload came that was not granted");
      }
      payload_transfer_ = found->second;
      granted_.erase(found);
      payload_ = static_cast<unsigned char*>(payload_transfer_->data);
      payload_left_ = header.bytes;
      if (payload_left_ == 0) end(*std::exchange(payload_transfer_, nullptr));
      return;
    }
    case FrameKind::kDone: {
      const auto found = requests_.find(header.key);
      if (found == requests_.end()) throw FrameError("a receipt for a message that was never announced");
      Transfer* transfer = found->second;
      requests_.erase(found);
      traffic_.bytes_sent += transfer->bytes;
      return end(*transfer);
    }
    case FrameKind::kCredit:
      if (header.key > eager_in_flight_) throw FrameError("more credit came back than was used");
      eager_in_flight_ -= header.key;
      return;
    default:
      throw FrameError("a frame that belongs on a control channel came over a link");
  }
}

void Channel::takeEager(const FrameHeader& header) {
  Transfer* transfer = takePosted(header.message_class, header.key);
  payload_left_ = header.bytes;
  if (transfer != nullptr) {
    checkSize(header, *transfer);
    transfer->bytes = header.bytes;
    transfer->peer = peer_;
    payload_ = static_cast<unsigned char*>(transfer->data);
    if (payload_left_ == 0) {
      returnCredit(kFrameHeaderBytes);
      return end(*transfer);
    }
    payload_transfer_ = transfer;
    payload_credit_ = header.bytes + kFrameHeaderBytes;
    return;
  }
  if (unexpected_bytes_ + header.bytes > kEagerWindowBytes) throw FrameError("a peer sent more than its window");
  if (unexpected_.size() >= kUnexpectedMax) throw FrameError("a peer sent more messages than can be kept");
  unexpected_bytes_ += header.bytes;
  unexpected_.push_back({header, 0, std::unique_ptr<unsigned char[]>(new unsigned char[header.bytes])});
  payload_ = unexpected_.back().payload.get();
}

void Channel::takeRequest(const FrameHeader& header) {
  const std::uint64_t id = seen_requests_++;
  Transfer* transfer = takePosted(header.message_class, header.key);
  if (transfer == nullptr) {
    if (unexpected_.size() >= kUnexpectedMax) throw FrameError("a peer announced more messages than can be kept");
    unexpected_.push_back({header, id, nullptr});
    return;
  }
  checkSize(header, *transfer);
  transfer->peer = peer_;
  answerRequest(id, header, *transfer);
}

Transfer* Channel::takePosted(FrameClass message_class, std::uint64_t key) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Transfer* transfer) {
    return transfer->key == key && transfer->message_class == message_class;
  });
  if (found == posted_.end()) {
    Transfer* transfer = message_class == FrameClass::kPointToPoint ? any_source_(message_class, key) : nullptr;
    if (transfer != nullptr) ++outstanding_;
    return transfer;
  }
  Transfer* transfer = *found;
  posted_.erase(found);
  return transfer;
}

void Channel::answerRequest(std::uint64_t id, const FrameHeader& header, Transfer& transfer) {
  transfer.bytes = header.bytes;
  if (header.address != 0 && link_->canReadRemote()) {
    fetches_.push_back({id, header.address, &transfer});
    fetch_ = fetches_.front().transfer;
    return;
  }
  granted_.emplace(id, &transfer);
  FrameHeader grant;
  grant.kind = FrameKind::kGrant;
  grant.key = id;
  push(grant, nullptr, 0, nullptr);
}

bool Channel::fetch() {
  std::size_t moved = 0;
  while (fetch_ != nullptr && moved < kProgressBytesMax) {
    Fetch& fetch = fetches_.front();
    Transfer& transfer = *fetch.transfer;
    const std::size_t bytes = std::min(transfer.bytes - transfer.fetched, kProgressBytesMax);
    link_->readRemote(fetch.address + transfer.fetched, static_cast<unsigned char*>(transfer.data) + transfer.fetched,
                      bytes);
    transfer.fetched += bytes;
    moved += bytes;
    if (transfer.fetched < transfer.bytes) break;
    FrameHeader done;
    done.kind = FrameKind::kDone;
    done.key = fetch.request;
    push(done, nullptr, 0, nullptr);
    fetches_.pop_front();
    fetch_ = fetches_.empty() ? nullptr : fetches_.front().transfer;
    end(transfer);
  }
  traffic_.bytes_received += moved;
  return moved > 0;
}

void Channel::checkSize(const FrameHeader& header, const Transfer& transfer) const {
  if (header.bytes == transfer.bytes || (!transfer.exact && header.bytes < transfer.bytes)) return;
  throw CollectiveMismatch("group rank " + std::to_string(peer_) + " sent " + std::to_string(header.bytes) +
                           " bytes where this rank expects " + std::to_string(transfer.bytes) +
                           "; all ranks must call the same operation with matching sizes");
}

void Channel::returnCredit(std::size_t bytes) {
  credit_ += bytes;
  if (credit_ < kEagerWindowBytes / 4) return;
  FrameHeader credit;
  credit.kind = FrameKind::kCredit;
  credit.key = std::exchange(credit_, 0);
  push(credit, nullptr, 0, nullptr);
}

void Channel::end(Transfer& transfer) {
  --outstanding_;
  transfer.listener->transferEnded(transfer);
}

}  // namespace trainmover
