// Fuzzes both sides of wire/handshake.h: whatever bytes come in whatever pieces, they throw HandshakeError or wait or
// end; they hold no more than a message, and believe nothing that was not signed. Started by test_cpp.py: seconds,
// seed.
#include <algorithm>

#include "fuzzing.h"
#include "wire/handshake.h"

namespace {

using namespace trainmover;  // NOLINT: a test of one namespace
using fuzzing::Bytes;
using fuzzing::require;

const char* const kToken = "token";

Nonce nonceOf(std::uint8_t value) {
  Nonce nonce;
  nonce.fill(value);
  return nonce;
}

/// Valid messages of one exchange: what is not these, byte for byte, must not be believed.
struct Seeds {
  Bytes challenge;
  Bytes hello;
  std::vector<Bytes> welcomes;
  std::vector<Bytes> all;

  Seeds() {
    AcceptorHandshake acceptor(kToken, nonceOf(1));
    InitiatorHandshake initiator(kToken, nonceOf(2), Hello{});
    challenge = acceptor.challenge();
    initiator.receive(challenge.data(), challenge.size());
    hello = initiator.hello();
    acceptor.receive(hello.data(), hello.size());
    for (const std::size_t reason : {0, 9, 256}) {
      welcomes.push_back(acceptor.welcome({Verdict::kWrongRank, std::string(reason, 'r')}));
    }
    all = welcomes;
    all.push_back(hello);
    all.push_back(challenge);
    all.push_back(challenge);
    all.back().insert(all.back().end(), welcomes[1].begin(), welcomes[1].end());
  }
};

/// Delivers `bytes` in random pieces until the side refuses, takes nothing more, or all are gone. Returns the bytes it
/// consumed, and whether it threw.
template <typename Side>
std::size_t feed(fuzzing::Random& random, Side& side, const Bytes& bytes, bool* refused) {
  std::size_t at = 0;
  *refused = false;
  try {
    while (at < bytes.size()) {
      const std::size_t piece = std::min(bytes.size() - at, 1 + random.below(random.oneIn(2) ? 8 : 2048));
      // Copied, so that reading past the piece is seen by the sanitizer.
      const Bytes copy(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       bytes.begin() + static_cast<std::ptrdiff_t>(at + piece));
      const std::size_t taken = side.receive(copy.data(), copy.size());
      require(taken <= copy.size(), "no more is consumed than was given");
      require(side.heldBytes() <= kHandshakeMessageBytesMax + 4, "no more than a message is held");
      at += taken;
      if (taken == 0) break;
    }
  } catch (const HandshakeError&) {
    *refused = true;
    require(side.heldBytes() <= kHandshakeMessageBytesMax + 4, "no more than a message is held after an error");
  }
  return at;
}

bool beginsWith(const Bytes& bytes, const Bytes& prefix) {
  return bytes.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), bytes.begin());
}

/// A mutated message, in a part of the runs with enough behind it to satisfy any length.
Bytes stream(fuzzing::Random& random, const Seeds& seeds) {
  Bytes bytes = fuzzing::mutated(random, seeds.all);
  if (random.oneIn(4)) bytes.resize(bytes.size() + 2 * kHandshakeMessageBytesMax, random.byte());
  return bytes;
}

void fuzzAcceptor(fuzzing::Random& random, const Seeds& seeds) {
  AcceptorHandshake acceptor(kToken, nonceOf(1));
  const Bytes bytes = stream(random, seeds);
  bool refused = false;
  const std::size_t consumed = feed(random, acceptor, bytes, &refused);
  const bool genuine = beginsWith(bytes, seeds.hello);
  require(acceptor.hello().has_value() == genuine, "a HELLO is believed if, and only if, it is the signed one");
  require(!genuine || consumed == seeds.hello.size(), "a HELLO is consumed to its last byte and no further");
  require(!genuine || !refused, "the signed HELLO is not refused");
}

void fuzzInitiator(fuzzing::Random& random, const Seeds& seeds) {
  InitiatorHandshake initiator(kToken, nonceOf(2), Hello{});
  // Mostly from where it waits for the WELCOME; the CHALLENGE is mutated in the other runs.
  const bool challenged = !random.oneIn(4);
  if (challenged) initiator.receive(seeds.challenge.data(), seeds.challenge.size());
  Bytes bytes = stream(random, seeds);
  bool refused = false;
  feed(random, initiator, bytes, &refused);
  if (!challenged) {
    // Its own nonce is under the HMAC: a welcome needs the genuine challenge first.
    if (!beginsWith(bytes, seeds.challenge)) {
      require(!initiator.welcome().has_value(), "no WELCOME is believed after another CHALLENGE");
      return;
    }
    bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(seeds.challenge.size()));
  }
  const bool genuine = std::any_of(seeds.welcomes.begin(), seeds.welcomes.end(),
                                   [&bytes](const Bytes& welcome) { return beginsWith(bytes, welcome); });
  require(initiator.welcome().has_value() == genuine, "a WELCOME is believed if, and only if, it is a signed one");
}

/// An initiator that knows the token and says whatever it likes.
void fuzzSignedHello(fuzzing::Random& random) {
  const auto number = [&random] { return random.oneIn(3) ? ~std::uint64_t{0} : std::uint64_t{random.below(~0ULL)}; };
  Hello hello;
  hello.purpose = static_cast<Purpose>(random.oneIn(2) ? 1 + random.below(3) : random.byte());
  for (std::uint8_t& byte : hello.job) byte = random.byte();
  hello.communicator = number();
  hello.generation = number();
  hello.from_rank = static_cast<std::int32_t>(static_cast<std::uint32_t>(number()));
  hello.to_rank = static_cast<std::int32_t>(random.below(1000));
  hello.from_incarnation = number();
  hello.to_incarnation = number();
  AcceptorHandshake acceptor(kToken, nonceOf(random.byte()));
  InitiatorHandshake initiator(kToken, nonceOf(random.byte()), hello);
  const Bytes challenge = acceptor.challenge();
  initiator.receive(challenge.data(), challenge.size());
  bool refused = false;
  feed(random, acceptor, initiator.hello(), &refused);
  const int purpose = static_cast<int>(hello.purpose);
  const bool valid = purpose >= 1 && purpose <= 3 && hello.from_rank >= 0;
  require(refused != valid, "a signed HELLO is refused if, and only if, a field is out of bounds");
  require(acceptor.hello().has_value() == valid, "a refused HELLO is not believed");
  if (!valid) return;
  const Hello& got = *acceptor.hello();
  require(got.purpose == hello.purpose && got.job == hello.job && got.communicator == hello.communicator &&
              got.generation == hello.generation && got.from_rank == hello.from_rank && got.to_rank == hello.to_rank &&
              got.from_incarnation == hello.from_incarnation && got.to_incarnation == hello.to_incarnation,
          "a HELLO comes over as it was meant");
}

}  // namespace

int main(int argc, char** argv) {
  const Seeds seeds;
  return fuzzing::run(argc, argv, [&seeds](fuzzing::Random& random) {
    fuzzAcceptor(random, seeds);
    fuzzInitiator(random, seeds);
    fuzzSignedHello(random);
  });
}
