// The three messages of the handshake and the two state machines that exchange them; see handshake.h. Called by
// runtime/control_plane.cc.
//
//   CHALLENGE  length, 1, magic u32, version u16, nonce A [16]; its size is the same in every version
//   HELLO      length, 2, version u16, purpose u8, job [32], communicator u64, generation u64, from u32, to u32,
//              from_incarnation u64, to_incarnation u64, nonce I [16], HMAC [32]
//   WELCOME    length, 3, verdict u8, reason length u16, reason, HMAC [32]
//
// An HMAC covers a label of its message type, nonce A, nonce I (WELCOME; in a HELLO it is a field) and every byte of
// the message before the HMAC. So what one side signs never verifies on the other, nor in another connection.
#include "wire/handshake.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire/little_endian.h"
#include "wire/sha256.h"

namespace trainmover {
namespace {

enum class MessageType : std::uint8_t { kChallenge = 1, kHello = 2, kWelcome = 3 };

constexpr std::uint32_t kMagic = 0x564f4d54;  // "TMOV" as bytes on the wire
constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kPrefixBytes = kLengthBytes + 1;
constexpr std::size_t kReasonBytesMax = 256;
constexpr std::size_t kChallengeBytes = kPrefixBytes + 4 + 2 + sizeof(Nonce);
constexpr std::size_t kHelloBytes =
    kPrefixBytes + 2 + 1 + sizeof(Digest) + 8 + 8 + 4 + 4 + 8 + 8 + sizeof(Nonce) + sizeof(Digest);
constexpr std::size_t kWelcomeBytesMin = kPrefixBytes + 1 + 2 + sizeof(Digest);
constexpr std::size_t kWelcomeBytesMax = kWelcomeBytesMin + kReasonBytesMax;
static_assert(kHelloBytes <= kHandshakeMessageBytesMax && kWelcomeBytesMax <= kHandshakeMessageBytesMax);

const char* nameOf(MessageType type) {
  switch (type) {
    case MessageType::kChallenge:
      return "CHALLENGE";
    case MessageType::kHello:
      return "HELLO";
    case MessageType::kWelcome:
      return "WELCOME";
  }
  return "message";
}

/// Builds a message field by field; the length is filled in by sealed().
class Writer {
 public:
  explicit Writer(MessageType type) {
    bytes_.resize(kLengthBytes);
    put(static_cast<std::uint8_t>(type));
  }
  template <typename T>
  void put(T value) {
    bytes_.resize(bytes_.size() + sizeof(T));
    storeLittleEndian(bytes_.data() + bytes_.size() - sizeof(T), value);
  }
  template <std::size_t N>
  void put(const std::array<std::uint8_t, N>& value) {
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  void put(const std::string& value) { bytes_.insert(bytes_.end(), value.begin(), value.end()); }

  /// The message so far, its length field set as if `more` bytes were to follow.
  std::vector<std::uint8_t>& sealed(std::size_t more) {
    storeLittleEndian(bytes_.data(), static_cast<std::uint32_t>(bytes_.size() + more - kLengthBytes));
    return bytes_;
  }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// Takes a whole message apart. Its size has been checked, so reading past the end would be our own mistake.
class Reader {
 public:
  explicit Reader(const std::vector<std::uint8_t>& message) : at_(message.data() + kPrefixBytes) {}
  template <typename T>
  T number() {
    const T value = loadLittleEndian<T>(at_);
    at_ += sizeof(T);
    return value;
  }
  template <std::size_t N>
  void array(std::array<std::uint8_t, N>& to) {
    std::memcpy(to.data(), at_, N);
    at_ += N;
  }
  std::string text(std::size_t bytes) {
    std::string value(at_, at_ + bytes);
    at_ += bytes;
    return value;
  }

 private:
  const std::uint8_t* at_;
};

/// Moves bytes of `data` to `pending` until that holds one message of `type`, sized bytes_min to bytes_max with its
/// prefix. The prefix is checked as soon as it is there, so that nothing waits for a message that can only be wrong.
std::size_t gather(std::vector<std::uint8_t>& pending, const std::uint8_t* data, std::size_t bytes, MessageType type,
                   std::size_t bytes_min, std::size_t bytes_max, bool* complete) {
  std::size_t taken = 0;
  const auto takeUpTo = [&](std::size_t size) {
    const std::size_t more = std::min(bytes - taken, size - pending.size());
    if (more > 0) pending.insert(pending.end(), data + taken, data + taken + more);
    taken += more;
    return pending.size() == size;
  };
  *complete = false;
  if (pending.size() < kPrefixBytes && !takeUpTo(kPrefixBytes)) return taken;
  const std::size_t size = std::size_t{loadLittleEndian<std::uint32_t>(pending.data())} + kLengthBytes;
  if (pending[kLengthBytes] != static_cast<std::uint8_t>(type)) {
    throw HandshakeError("handshake: found a message of type " + std::to_string(pending[kLengthBytes]) +
                         ", expected a " + nameOf(type) + "; does something else listen on, or call, this port?");
  }
  if (size < bytes_min || size > bytes_max) {
    throw HandshakeError(std::string("handshake: found a ") + nameOf(type) + " of " + std::to_string(size) +
                         " bytes, expected " + std::to_string(bytes_min) + " to " + std::to_string(bytes_max) +
                         "; do all ranks run the same release?");
  }
  *complete = takeUpTo(size);
  return taken;
}

void checkVersion(std::uint16_t version) {
  if (version == kProtocolVersion) return;
  throw HandshakeError("handshake: found protocol version " + std::to_string(version) + ", expected " +
                       std::to_string(kProtocolVersion) + "; run the same release on all ranks");
}

Digest signatureOf(const std::string& token, MessageType type, const Nonce& acceptor, const Nonce* initiator,
                   const std::uint8_t* message, std::size_t bytes) {
  std::string signed_text = std::string("trainmover handshake ") + nameOf(type);
  signed_text.append(acceptor.begin(), acceptor.end());
  if (initiator != nullptr) signed_text.append(initiator->begin(), initiator->end());
  signed_text.append(message, message + bytes);
  return hmacSha256(token, signed_text.data(), signed_text.size());
}

/// Appends the HMAC of all bytes so far and returns the finished message.
std::vector<std::uint8_t> sign(Writer& writer, const std::string& token, MessageType type, const Nonce& acceptor,
                               const Nonce* initiator) {
  const std::vector<std::uint8_t>& message = writer.sealed(sizeof(Digest));
  writer.put(signatureOf(token, type, acceptor, initiator, message.data(), message.size()));
  return std::move(writer.sealed(0));
}

void verify(const std::vector<std::uint8_t>& message, const std::string& token, MessageType type, const Nonce& acceptor,
            const Nonce* initiator) {
  const std::size_t covered = message.size() - sizeof(Digest);
  Digest found;
  std::memcpy(found.data(), message.data() + covered, sizeof(Digest));
  if (equalDigests(found, signatureOf(token, type, acceptor, initiator, message.data(), covered))) return;
  throw HandshakeError(std::string("handshake: the ") + nameOf(type) +
                       " is not signed with this job's token; give all ranks the same token");
}

std::int32_t checkedRank(std::uint32_t rank) {
  if (rank <= INT32_MAX) return static_cast<std::int32_t>(rank);
  throw HandshakeError("handshake: found rank " + std::to_string(rank) + " in a HELLO, expected less than 2^31");
}

Purpose checkedPurpose(std::uint8_t purpose) {
  if (purpose >= static_cast<std::uint8_t>(Purpose::kControl) &&
      purpose <= static_cast<std::uint8_t>(Purpose::kSegment)) {
    return static_cast<Purpose>(purpose);
  }
  throw HandshakeError("handshake: found purpose " + std::to_string(purpose) + " in a HELLO, expected 1 to 3");
}

}  // namespace

const char* nameOf(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWelcome:
      return "welcome";
    case Verdict::kWrongJob:
      return "wrong job";
    case Verdict::kWrongRank:
      return "wrong rank";
    case Verdict::kWrongIncarnation:
      return "wrong incarnation";
    case Verdict::kStaleGeneration:
      return "stale generation";
    case Verdict::kDuplicate:
      return "duplicate";
    case Verdict::kUnknown:
      return "unknown communicator";
    case Verdict::kBusy:
      return "busy";
  }
  return "invalid verdict";
}

AcceptorHandshake::AcceptorHandshake(std::string token, Nonce nonce) : token_(std::move(token)), nonce_(nonce) {}

std::vector<std::uint8_t> AcceptorHandshake::challenge() const {
  Writer writer(MessageType::kChallenge);
  writer.put(kMagic);
  writer.put(kProtocolVersion);
  writer.put(nonce_);
  return std::move(writer.sealed(0));
}

std::size_t AcceptorHandshake::receive(const std::uint8_t* data, std::size_t bytes) {
  if (hello_) return 0;
  bool complete = false;
  const std::size_t taken = gather(pending_, data, bytes, MessageType::kHello, kHelloBytes, kHelloBytes, &complete);
  if (!complete) return taken;
  Reader reader(pending_);
  // Before the signature: another release signs differently, and its user should hear of the version.
  checkVersion(reader.number<std::uint16_t>());
  verify(pending_, token_, MessageType::kHello, nonce_, nullptr);
  Hello hello;
  hello.purpose = checkedPurpose(reader.number<std::uint8_t>());
  reader.array(hello.job);
  hello.communicator = reader.number<std::uint64_t>();
  hello.generation = reader.number<std::uint64_t>();
  hello.from_rank = checkedRank(reader.number<std::uint32_t>());
  hello.to_rank = checkedRank(reader.number<std::uint32_t>());
  hello.from_incarnation = reader.number<std::uint64_t>();
  hello.to_incarnation = reader.number<std::uint64_t>();
  reader.array(initiator_nonce_);
  hello_ = hello;
  pending_.clear();
  return taken;
}

std::vector<std::uint8_t> AcceptorHandshake::welcome(const Welcome& welcome) const {
  if (!hello_) throw std::logic_error("handshake: welcome() was called before there is a HELLO to answer");
  const std::string reason = welcome.reason.substr(0, kReasonBytesMax);
  Writer writer(MessageType::kWelcome);
  writer.put(static_cast<std::uint8_t>(welcome.verdict));
  writer.put(static_cast<std::uint16_t>(reason.size()));
  writer.put(reason);
  return sign(writer, token_, MessageType::kWelcome, nonce_, &initiator_nonce_);
}

InitiatorHandshake::InitiatorHandshake(std::string token, Nonce nonce, Hello hello)
    : token_(std::move(token)), nonce_(nonce), hello_(hello) {}

std::size_t InitiatorHandshake::receive(const std::uint8_t* data, std::size_t bytes) {
  if (welcome_) return 0;
  return signed_hello_.empty() ? receiveChallenge(data, bytes) : receiveWelcome(data, bytes);
}

std::size_t InitiatorHandshake::receiveChallenge(const std::uint8_t* data, std::size_t bytes) {
  bool complete = false;
  const std::size_t taken =
      gather(pending_, data, bytes, MessageType::kChallenge, kChallengeBytes, kChallengeBytes, &complete);
  if (!complete) return taken;
  Reader reader(pending_);
  if (reader.number<std::uint32_t>() != kMagic) {
    throw HandshakeError("handshake: the CHALLENGE doesn't begin with our magic number; something else listens there");
  }
  checkVersion(reader.number<std::uint16_t>());
  reader.array(acceptor_nonce_);
  Writer writer(MessageType::kHello);
  writer.put(kProtocolVersion);
  writer.put(static_cast<std::uint8_t>(hello_.purpose));
  writer.put(hello_.job);
  writer.put(hello_.communicator);
  writer.put(hello_.generation);
  writer.put(static_cast<std::uint32_t>(hello_.from_rank));
  writer.put(static_cast<std::uint32_t>(hello_.to_rank));
  writer.put(hello_.from_incarnation);
  writer.put(hello_.to_incarnation);
  writer.put(nonce_);
  signed_hello_ = sign(writer, token_, MessageType::kHello, acceptor_nonce_, nullptr);
  pending_.clear();
  return taken;
}

std::size_t InitiatorHandshake::receiveWelcome(const std::uint8_t* data, std::size_t bytes) {
  bool complete = false;
  const std::size_t taken =
      gather(pending_, data, bytes, MessageType::kWelcome, kWelcomeBytesMin, kWelcomeBytesMax, &complete);
  if (!complete) return taken;
  verify(pending_, token_, MessageType::kWelcome, acceptor_nonce_, &nonce_);
  Reader reader(pending_);
  const auto verdict = reader.number<std::uint8_t>();
  if (verdict > static_cast<std::uint8_t>(Verdict::kBusy)) {
    throw HandshakeError("handshake: found verdict " + std::to_string(verdict) + " in a WELCOME, expected 0 to 7");
  }
  const std::size_t reason_bytes = reader.number<std::uint16_t>();
  if (reason_bytes != pending_.size() - kWelcomeBytesMin) {
    throw HandshakeError("handshake: a WELCOME says its reason has " + std::to_string(reason_bytes) +
                         " bytes, expected " + std::to_string(pending_.size() - kWelcomeBytesMin));
  }
  welcome_ = Welcome{static_cast<Verdict>(verdict), reader.text(reason_bytes)};
  pending_.clear();
  return taken;
}

}  // namespace trainmover
