// The trace of operations: what is hashed, and the lines that real ranks write.
#include "runtime/operation_trace.h"

#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "runtime_calls.h"

namespace trainmover {
namespace {

using namespace check;

constexpr int kFields = 12;
enum Field {
  kNumber,
  kIteration,
  kCalled,
  kGroup,
  kRanks,
  kOperation,
  kPeer,
  kGivenBytes,
  kGotBytes,
  kGivenHash,
  kGotHash,
  kEnded
};

using Line = std::vector<std::string>;

/// A folder that goes away with all that is in it.
class Folder {
 public:
  Folder() { CHECK(::mkdtemp(path_) != nullptr); }
  ~Folder() {
    const std::string command = std::string("rm -r ") + path_;
    if (::system(command.c_str()) != 0) std::fprintf(stderr, "%s failed\n", command.c_str());
  }
  std::string prefix() const { return std::string(path_) + "/"; }

 private:
  char path_[32] = "/tmp/operation_trace_XXXXXX";
};

Line fieldsOf(const std::string& text) {
  Line line;
  std::istringstream fields(text);
  for (std::string field; std::getline(fields, field, '\t');) line.push_back(field);
  CHECK_EQ(line.size(), static_cast<std::size_t>(kFields));
  return line;
}

/// What the process itself has left so far.
std::vector<Line> linesOf(const std::string& prefix, int rank) {
  std::ifstream file(prefix + std::to_string(rank) + "." + std::to_string(::getpid()));
  CHECK(file.good());
  std::vector<Line> lines;
  for (std::string text; std::getline(file, text);) lines.push_back(fieldsOf(text));
  return lines;
}

TEST(every_single_changed_byte_changes_the_hash) {
  std::vector<unsigned char> bytes(77);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 7);
  const std::uint64_t whole = hashOf(bytes.data(), bytes.size(), 1);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] = static_cast<unsigned char>(bytes[i] ^ 1 << bit);
      CHECK(hashOf(bytes.data(), bytes.size(), 1) != whole);
      bytes[i] = static_cast<unsigned char>(bytes[i] ^ 1 << bit);
    }
  }
  CHECK_EQ(hashOf(bytes.data(), bytes.size(), 1), whole);
}

TEST(length_and_order_count) {
  const std::uint64_t zeros[4] = {};
  CHECK(hashOf(zeros, 8, 1) != hashOf(zeros, 16, 1));
  CHECK(hashOf(zeros, 7, 1) != hashOf(zeros, 8, 1));
  const std::uint64_t one[2] = {1, 2}, other[2] = {2, 1};
  CHECK(hashOf(one, sizeof one, 1) != hashOf(other, sizeof other, 1));
}

TEST(what_a_broadcast_is_about_to_overwrite_is_not_what_it_is_given) {
  std::vector<float> values(4);
  CollectiveCall call;
  call.kind = CollectiveKind::kBroadcast;
  call.outputs = {bufferOf(values)};
  CHECK_EQ(givenTo(call, 0).size(), std::size_t{1});
  CHECK_EQ(givenTo(call, 1).size(), std::size_t{0});
  call.kind = CollectiveKind::kAllReduce;
  CHECK_EQ(givenTo(call, 1).size(), std::size_t{1});
}

TEST(a_folder_that_is_not_there_is_refused) { CHECK_THROWS(OperationTrace("/nowhere/at/all/"), TransportError); }

/// A sum, a message and a broadcast between two ranks; `harm` changes one bit of what rank 1 gives to the sum.
std::vector<std::vector<Line>> runTwoRanks(Path path, unsigned harm) {
  const Folder folder;
  const auto body = [&](Member& member) {
    Settings settings = settingsFor(path, member.size());
    settings.trace_path = folder.prefix();
    const auto runtime = joinRuntime(member, settings);
    const auto group = world(*runtime, member.size());
    runtime->noteIteration(5);
    std::vector<std::uint32_t> values(1000, static_cast<unsigned>(member.rank()) * 7), message(10, 3), room(20);
    if (member.rank() == 1) values[999] ^= harm;
    start(*group, CollectiveKind::kAllReduce, {}, {bufferOf(values)}, 0, DataType::kUInt32)->wait();
    runtime->noteIteration(6);
    if (member.rank() == 0) {
      group->send(bufferOf(message), 1, 9, kCallLimit)->wait();
    } else {
      room.back() = harm;  // beyond the message: not what the receive gives
      group->receive(bufferOf(room), 0, 9, kCallLimit)->wait();
    }
    start(*group, CollectiveKind::kBroadcast, {}, {bufferOf(message)})->wait();
    barrier(*group);
    member.meet();
    const auto lines = linesOf(folder.prefix(), member.rank());
    CHECK_EQ(lines.size(), std::size_t{4});
    for (const Line& line : lines) {
      std::string text;
      for (const std::string& one : line) text += one + '\t';
      member.report(text);
    }
    runtime->shutdown();
  };
  std::vector<std::vector<Line>> all;
  for (const Ended& ended : runJob(2, body)) {
    all.emplace_back();
    for (const std::string& text : ended.reports) all.back().push_back(fieldsOf(text));
  }
  return all;
}

TEST(each_operation_leaves_a_line_over_every_transport) {
  for (const Path path : kPaths) {
    const auto lines = runTwoRanks(path, 0);
    const char* names[2][4] = {{"all_reduce", "send", "broadcast", "barrier"},
                               {"all_reduce", "recv", "broadcast", "barrier"}};
    for (std::size_t rank = 0; rank < 2; ++rank) {
      for (std::size_t i = 0; i < 4; ++i) {
        const Line& line = lines[rank][i];
        CHECK_EQ(line[kOperation], std::string(names[rank][i]));
        CHECK_EQ(line[kNumber], std::to_string(i));
        CHECK_EQ(line[kIteration], std::string(i == 0 ? "5" : "6"));
        CHECK_EQ(line[kGroup], std::string("world"));
        CHECK_EQ(line[kRanks], std::string("0,1"));
        CHECK_EQ(line[kPeer], std::string(i == 1 ? (rank == 0 ? "1" : "0") : "-1"));
        CHECK(std::stoull(line[kCalled]) <= std::stoull(line[kEnded]));
      }
    }
    CHECK(lines[0][0][kGivenHash] != lines[1][0][kGivenHash]);
    for (const std::size_t i : {std::size_t{0}, std::size_t{2}}) CHECK_EQ(lines[0][i][kGotHash], lines[1][i][kGotHash]);
    CHECK_EQ(lines[0][1][kGivenHash], lines[1][1][kGotHash]);
    CHECK_EQ(lines[0][2][kGivenHash], lines[0][2][kGotHash]);
  }
}

TEST(one_other_bit_shows_where_it_came_in_and_nowhere_else) {
  for (const Path path : kPaths) {
    const auto right = runTwoRanks(path, 0), wrong = runTwoRanks(path, 1u << 30);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      for (std::size_t i = 0; i < 4; ++i) {
        CHECK_EQ(right[rank][i][kGivenHash] == wrong[rank][i][kGivenHash], rank == 0 || i != 0);
        CHECK_EQ(right[rank][i][kGotHash] == wrong[rank][i][kGotHash], i != 0);
      }
    }
  }
}

}  // namespace
}  // namespace trainmover
