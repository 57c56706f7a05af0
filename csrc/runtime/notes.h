// Small messages from rank to rank beside the data, for whoever steers a switch: what has come and waits to be taken.
// The control plane's thread puts in, any thread takes out.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/types.h"

namespace trainmover {

struct Note {
  int peer = -1;              // global rank of the sender
  Generation generation = 0;  // that the note is about, in the sender's word
  std::string payload;
};

/// Notes that wait to be sent to one rank, or to be taken here.
constexpr std::size_t kNotesToSendMax = 256;
constexpr std::size_t kNotesReceivedMax = 4096;

class NoteBox {
 public:
  /// False when it is full: nobody takes them.
  bool put(Note note) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (notes_.size() >= kNotesReceivedMax) return false;
      notes_.push_back(std::move(note));
    }
    changed_.notify_one();
    return true;
  }

  /// The oldest; none when none came within `timeout`, or when the box was closed.
  std::optional<Note> take(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return closed_ || !notes_.empty(); });
    if (notes_.empty()) return std::nullopt;
    Note note = std::move(notes_.front());
    notes_.pop_front();
    return note;
  }

  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Note> notes_;
  bool closed_ = false;
};

}  // namespace trainmover
