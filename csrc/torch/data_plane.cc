// See data_plane.h.
#include "torch/data_plane.h"

#include <unistd.h>

#include <utility>

namespace trainmover {
namespace {

/// Keeps `object` from ever being destroyed.
template <typename T>
void abandon(std::shared_ptr<T>& object) {
  new std::shared_ptr<T>(std::move(object));
}

}  // namespace

DataPlane::DataPlane(std::shared_ptr<Runtime> runtime) : process_(getpid()), runtime_(std::move(runtime)) {}

DataPlane::~DataPlane() {
  shutdown();
  if (!isOurs()) {
    abandon(runtime_);
  }
}

bool DataPlane::isOurs() const { return process_ == getpid(); }

std::shared_ptr<OpenGroup> DataPlane::open(const std::string& name, const std::vector<int>& global_ranks,
                                           std::chrono::milliseconds timeout, bool world) {
  auto group =
      std::make_shared<OpenGroup>(shared_from_this(), runtime_->createCommunicator(name, global_ranks, timeout), world);
  const std::lock_guard<std::mutex> lock(mutex_);
  ++open_groups_;
  return group;
}

void DataPlane::closed(bool world) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --open_groups_;
    world_closed_ = world_closed_ || world;
    if (open_groups_ > 0 || !world_closed_) {
      return;
    }
  }
  shutdown();
}

void DataPlane::shutdown() {
  if (!isOurs()) {
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) {
      return;
    }
    ended_ = true;
  }
  runtime_->shutdown();
}

bool DataPlane::ended() const {
  if (!isOurs()) {
    return true;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

OpenGroup::~OpenGroup() {
  close();
  if (!data_plane_->isOurs()) {
    abandon(communicator_);
  }
}

void OpenGroup::close() {
  if (!data_plane_->isOurs()) {
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) {
      return;
    }
    closed_ = true;
  }
  communicator_->close();
  data_plane_->closed(world_);
}

}  // namespace trainmover
