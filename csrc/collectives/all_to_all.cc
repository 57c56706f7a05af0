// See all_to_all.h.
#include "collectives/all_to_all.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "base/errors.h"
#include "collectives/builders.h"
#include "collectives/schedule_builder.h"
#include "collectives/topology.h"

namespace trainmover {

namespace {

/// Blocks smaller than this travel packed, as many in a message as kPackBytesMax holds; others alone, without a copy.
constexpr std::size_t kSmallBlockBytes = std::size_t{16} << 10;
constexpr std::size_t kPackBytesMax = std::size_t{256} << 10;
constexpr std::uint64_t kBlockBytesMax = std::uint64_t{1} << 40;
constexpr std::size_t kEntryBytes = sizeof(std::uint64_t);

void validateForwarded(const Shape& shape) {
  if (shape.kind != CollectiveKind::kAllToAll) {
    throw std::invalid_argument("the builders of all_to_all.h got a shape of another kind; use buildSchedule()");
  }
  validateShape(shape);
  if (shape.size <= kDirectSize) {
    throw std::invalid_argument("all-to-all of a group of " + std::to_string(shape.size) +
                                ": nothing is forwarded where all are linked directly; use buildSchedule()");
  }
}

/// Calls `visit(first, count)` for the runs of consecutive deltas below `size` that have the bit `distance`.
template <typename Visit>
void forRuns(int size, int distance, Visit visit) {
  for (int first = distance; first < size; first += 2 * distance) visit(first, std::min(distance, size - first));
}

std::size_t blocksInRound(int size, int distance) {
  std::size_t blocks = 0;
  forRuns(size, distance, [&](int, int count) { blocks += static_cast<std::size_t>(count); });
  return blocks;
}

/// Sizes come from other ranks: nothing is set apart for one that cannot be.
std::size_t checkedSize(std::uint64_t bytes) {
  if (bytes > kBlockBytesMax) {
    throw CollectiveMismatch("all-to-all: a block of " + std::to_string(bytes) + " bytes was announced, more than " +
                             std::to_string(kBlockBytesMax) + "; make sure that all ranks make the same call");
  }
  return static_cast<std::size_t>(bytes);
}

/// Where a block lies between two rounds, and since when.
struct Place {
  Region region;
  StepId ready = kNoStep;
};

class DataBuilder {
 public:
  DataBuilder(const Shape& shape, const std::vector<std::uint64_t>& sizes)
      : shape_(shape), sizes_(sizes), builder_(shape, 4 * sizes.size()) {
    for (int delta = 0; delta < shape.size; ++delta) {
      const int to = modulo(static_cast<long>(shape.rank) + delta, shape.size);
      places_.push_back(Place{inputPiece(to, shape.pieces[static_cast<std::size_t>(to)])});
    }
  }

  Schedule build() {
    builder_.copy(places_[0].region, outputPiece(shape_.rank, places_[0].region.bytes), {});
    std::size_t first_size = 0;
    for (int distance = 1; distance < shape_.size; distance *= 2) {
      addSends(distance);
      addReceives(distance, first_size);
      first_size += blocksInRound(shape_.size, distance);
    }
    return builder_.take();
  }

 private:
  /// Cuts one round's blocks into messages, the same way at both ends: calls `alone(delta)` for each larger block and
  /// `packed(deltas, bytes)` for each pack of small ones.
  template <typename SizeOf, typename Alone, typename Packed>
  void forMessages(int distance, SizeOf size_of, Alone alone, Packed packed) const {
    std::vector<int> pack;
    std::size_t pack_bytes = 0;
    const auto flush = [&] {
      if (!pack.empty()) packed(pack, pack_bytes);
      pack.clear();
      pack_bytes = 0;
    };
    forRuns(shape_.size, distance, [&](int first, int count) {
      for (int delta = first; delta < first + count; ++delta) {
        const std::size_t bytes = size_of(delta);
        if (bytes >= kSmallBlockBytes) {
          alone(delta);
        } else if (bytes > 0) {
          if (pack_bytes + bytes > kPackBytesMax) flush();
          pack.push_back(delta);
          pack_bytes += bytes;
        }
      }
    });
    flush();
  }

  Place& placeOf(int delta) { return places_[static_cast<std::size_t>(delta)]; }

  void addSends(int distance) {
    const int peer = modulo(static_cast<long>(shape_.rank) + distance, shape_.size);
    std::uint64_t tag = 0;
    const auto alone = [&](int delta) {
      const Place& place = placeOf(delta);
      for (std::size_t begin = 0; begin < place.region.bytes; begin += kChunkBytes) {
        const std::size_t bytes = std::min(kChunkBytes, place.region.bytes - begin);
        builder_.send(peer, tag++, partOf(place.region, begin, bytes), {place.ready});
      }
    };
    const auto packed = [&](const std::vector<int>& deltas, std::size_t bytes) {
      const Region pack = builder_.scratch(bytes);
      std::vector<StepId> copied;
      std::size_t begin = 0;
      for (int delta : deltas) {
        const Place& place = placeOf(delta);
        copied.push_back(builder_.copy(place.region, partOf(pack, begin, place.region.bytes), {place.ready}));
        begin += place.region.bytes;
      }
      builder_.send(peer, tag++, pack, {builder_.join(copied)});
    };
    forMessages(distance, [&](int delta) { return placeOf(delta).region.bytes; }, alone, packed);
  }

  /// What arrives takes the places of what was sent: it goes on in a later round, or is for this rank.
  void addReceives(int distance, std::size_t first_size) {
    const int peer = modulo(static_cast<long>(shape_.rank) - distance, shape_.size);
    std::vector<std::size_t> arriving(static_cast<std::size_t>(shape_.size), 0);
    forRuns(shape_.size, distance, [&](int first, int count) {
      for (int delta = first; delta < first + count; ++delta) {
        arriving[static_cast<std::size_t>(delta)] = checkedSize(sizes_[first_size++]);
      }
    });
    const auto size_of = [&](int delta) { return arriving[static_cast<std::size_t>(delta)]; };
    forRuns(shape_.size, distance, [&](int first, int count) {
      for (int delta = first; delta < first + count; ++delta)
        placeOf(delta) = newPlace(delta, distance, size_of(delta));
    });
    std::uint64_t tag = 0;
    const auto alone = [&](int delta) {
      Place& place = placeOf(delta);
      if (place.region.space == Space::kScratch) place.region = builder_.scratch(place.region.bytes);
      std::vector<StepId> got;
      for (std::size_t begin = 0; begin < place.region.bytes; begin += kChunkBytes) {
        const std::size_t bytes = std::min(kChunkBytes, place.region.bytes - begin);
        got.push_back(builder_.receive(peer, tag++, partOf(place.region, begin, bytes), {}));
      }
      if (place.region.space == Space::kScratch) place.ready = builder_.join(got);
    };
    const auto packed = [&](const std::vector<int>& deltas, std::size_t bytes) {
      const Region pack = builder_.scratch(bytes);
      const StepId got = builder_.receive(peer, tag++, pack, {});
      std::size_t begin = 0;
      for (int delta : deltas) {
        Place& place = placeOf(delta);
        const Region arrived = partOf(pack, begin, place.region.bytes);
        begin += place.region.bytes;
        if (place.region.space == Space::kScratch) {
          place = Place{arrived, got};
        } else {
          builder_.copy(arrived, place.region, {got});
        }
      }
    };
    forMessages(distance, size_of, alone, packed);
  }

  /// Of a block of `bytes` that arrives at `distance`: the output if this was its last hop, else scratch still to be
  /// set apart.
  Place newPlace(int delta, int distance, std::size_t bytes) const {
    if (delta >= 2 * distance) return Place{Region{Space::kScratch, 0, 0, bytes}};
    const int from = modulo(static_cast<long>(shape_.rank) - delta, shape_.size);
    const std::size_t expected = shape_.received[static_cast<std::size_t>(from)];
    if (bytes != expected) {
      throw CollectiveMismatch("all-to-all: group rank " + std::to_string(from) + " gives " + std::to_string(bytes) +
                               " bytes to group rank " + std::to_string(shape_.rank) + ", which expects " +
                               std::to_string(expected) + "; make the split sizes of the two agree");
    }
    return Place{outputPiece(from, bytes)};
  }

  const Shape& shape_;
  const std::vector<std::uint64_t>& sizes_;
  ScheduleBuilder builder_;
  std::vector<Place> places_;  // [delta], of the block that goes on by the bits of delta still to come
};

}  // namespace

std::size_t allToAllSizeCount(int size) {
  std::size_t blocks = 0;
  for (int distance = 1; distance < size; distance *= 2) blocks += blocksInRound(size, distance);
  return blocks;
}

Schedule buildAllToAllSizes(const Shape& shape) {
  validateForwarded(shape);
  const int size = shape.size;
  const std::size_t vector_bytes = static_cast<std::size_t>(size) * kEntryBytes;
  ScheduleBuilder builder(shape, 4 * static_cast<std::size_t>(size) + 128);
  const Region all = builder.scratch(allToAllSizeCount(size) * kEntryBytes);  // first, as all_to_all.h says
  const Region current = builder.scratch(vector_bytes);  // [delta], of the block that goes on, as places_ above
  const auto entries = [](const Region& base, std::size_t first, int count) {
    return partOf(base, first * kEntryBytes, static_cast<std::size_t>(count) * kEntryBytes);
  };

  StepId ready = builder.copy(inputPiece(size, vector_bytes), current, {});
  std::size_t first_size = 0;
  std::uint64_t tag = 0;
  for (int distance = 1; distance < size; distance *= 2, ++tag) {
    const std::size_t blocks = blocksInRound(size, distance);
    const Region pack = builder.scratch(blocks * kEntryBytes);
    std::vector<StepId> packed;
    std::size_t place = 0;
    forRuns(size, distance, [&](int first, int count) {
      packed.push_back(
          builder.copy(entries(current, static_cast<std::size_t>(first), count), entries(pack, place, count), {ready}));
      place += static_cast<std::size_t>(count);
    });
    const StepId all_packed = builder.join(packed);
    builder.send(modulo(static_cast<long>(shape.rank) + distance, size), tag, pack, {all_packed});
    const StepId got = builder.receive(modulo(static_cast<long>(shape.rank) - distance, size), tag,
                                       entries(all, first_size, static_cast<int>(blocks)), {});
    std::vector<StepId> unpacked;
    forRuns(size, distance, [&](int first, int count) {
      unpacked.push_back(builder.copy(entries(all, first_size, count),
                                      entries(current, static_cast<std::size_t>(first), count), {got, all_packed}));
      first_size += static_cast<std::size_t>(count);
    });
    ready = builder.join(unpacked);
  }
  return builder.take();
}

Schedule buildAllToAllData(const Shape& shape, const std::vector<std::uint64_t>& sizes) {
  validateForwarded(shape);
  if (sizes.size() != allToAllSizeCount(shape.size)) {
    throw std::invalid_argument("all-to-all of a group of " + std::to_string(shape.size) + ": " +
                                std::to_string(sizes.size()) + " sizes of blocks, expected " +
                                std::to_string(allToAllSizeCount(shape.size)) + "; run buildAllToAllSizes() first");
  }
  return DataBuilder(shape, sizes).build();
}

Schedule buildAllToAllDirect(const Shape& shape) {
  ScheduleBuilder builder(shape, 2 * static_cast<std::size_t>(shape.size));
  const std::size_t own = static_cast<std::size_t>(shape.rank);
  builder.copy(inputPiece(shape.rank, shape.pieces[own]), outputPiece(shape.rank, shape.received[own]), {});
  for (int distance = 1; distance < shape.size; ++distance) {
    const int to = modulo(static_cast<long>(shape.rank) + distance, shape.size);
    const int from = modulo(static_cast<long>(shape.rank) - distance, shape.size);
    const Region given = inputPiece(to, shape.pieces[static_cast<std::size_t>(to)]);
    const Region taken = outputPiece(from, shape.received[static_cast<std::size_t>(from)]);
    for (std::size_t begin = 0; begin < given.bytes; begin += kChunkBytes) {
      builder.send(to, begin / kChunkBytes, partOf(given, begin, std::min(kChunkBytes, given.bytes - begin)), {});
    }
    for (std::size_t begin = 0; begin < taken.bytes; begin += kChunkBytes) {
      builder.receive(from, begin / kChunkBytes, partOf(taken, begin, std::min(kChunkBytes, taken.bytes - begin)), {});
    }
  }
  return builder.take();
}

}  // namespace trainmover
