// The runtime of this process and the groups made in it, so that the runtime ends with the last of them. Made by
// bindings.cc; held by each OpenGroup, and so by backends and communicator objects. Knows no torch.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/runtime.h"

namespace trainmover {

class OpenGroup;

class DataPlane : public std::enable_shared_from_this<DataPlane> {
 public:
  explicit DataPlane(std::shared_ptr<Runtime> runtime);
  ~DataPlane();
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  Runtime& runtime() { return *runtime_; }

  /// A group of `global_ranks`. `world`: of all ranks; its end is what the runtime's end waits for.
  std::shared_ptr<OpenGroup> open(const std::string& name, const std::vector<int>& global_ranks,
                                  std::chrono::milliseconds timeout, bool world);

  /// Tells peers goodbye and releases everything. Idempotent; may block for the progress thread: not under the GIL.
  void shutdown();
  bool ended() const;

 private:
  friend class OpenGroup;
  /// False in a child that was forked since: threads and connections are the parent's, and must be left alone.
  bool isOurs() const;
  void closed(bool world);

  const int process_;
  std::shared_ptr<Runtime> runtime_;
  mutable std::mutex mutex_;
  int open_groups_ = 0;
  bool world_closed_ = false;
  bool ended_ = false;
};

/// One communicator in use. Closing it twice does nothing.
class OpenGroup {
 public:
  OpenGroup(std::shared_ptr<DataPlane> data_plane, std::shared_ptr<Communicator> communicator, bool world)
      : data_plane_(std::move(data_plane)), communicator_(std::move(communicator)), world_(world) {}
  ~OpenGroup();
  OpenGroup(const OpenGroup&) = delete;
  OpenGroup& operator=(const OpenGroup&) = delete;

  Communicator& communicator() { return *communicator_; }
  DataPlane& dataPlane() { return *data_plane_; }

  /// Fails what is outstanding; ends the runtime when this was the last group and WORLD's is closed. Not under the GIL.
  void close();

 private:
  const std::shared_ptr<DataPlane> data_plane_;
  std::shared_ptr<Communicator> communicator_;
  const bool world_;
  std::mutex mutex_;
  bool closed_ = false;
};

}  // namespace trainmover
