// wire/handshake.cc: two honest sides understand each other however the bytes arrive; anything else is refused.
#include "wire/handshake.h"

#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "wire/sha256.h"

namespace {

using namespace trainmover;  // NOLINT: a test of one namespace

using Bytes = std::vector<std::uint8_t>;

const char* const kToken = "a token of the job";

Nonce nonceOf(std::uint8_t first) {
  Nonce nonce;
  for (std::size_t i = 0; i < nonce.size(); ++i) nonce[i] = static_cast<std::uint8_t>(first + 7 * i);
  return nonce;
}

Hello someHello() {
  Hello hello;
  hello.purpose = Purpose::kLink;
  for (std::size_t i = 0; i < hello.job.size(); ++i) hello.job[i] = static_cast<std::uint8_t>(i * 3);
  hello.communicator = 0x1122334455667788;
  hello.generation = 41;
  hello.from_rank = 3;
  hello.to_rank = 2147483647;
  hello.from_incarnation = 0xfedcba9876543210;
  hello.to_incarnation = 9;
  return hello;
}

void checkEqualHellos(const Hello& a, const Hello& b) {
  CHECK_EQ(a.purpose, b.purpose);
  CHECK(a.job == b.job);
  CHECK_EQ(a.communicator, b.communicator);
  CHECK_EQ(a.generation, b.generation);
  CHECK_EQ(a.from_rank, b.from_rank);
  CHECK_EQ(a.to_rank, b.to_rank);
  CHECK_EQ(a.from_incarnation, b.from_incarnation);
  CHECK_EQ(a.to_incarnation, b.to_incarnation);
}

template <typename Side>
std::size_t deliver(Side& side, const Bytes& bytes) {
  return side.receive(bytes.data(), bytes.size());
}

/// Two sides, and the messages that they exchange when nobody interferes.
struct Exchange {
  AcceptorHandshake acceptor{kToken, nonceOf(1)};
  InitiatorHandshake initiator{kToken, nonceOf(100), someHello()};
  Bytes challenge = acceptor.challenge();
  Bytes hello;
  Bytes welcome;

  explicit Exchange(const Welcome& answer = {Verdict::kBusy, "try again"}) {
    deliver(initiator, challenge);
    hello = initiator.hello();
    deliver(acceptor, hello);
    welcome = acceptor.welcome(answer);
  }
};

/// An initiator that waits for the WELCOME of `exchange`.
InitiatorHandshake waitingInitiator(const Exchange& exchange, std::uint8_t nonce = 100) {
  InitiatorHandshake initiator(kToken, nonceOf(nonce), someHello());
  deliver(initiator, exchange.challenge);
  return initiator;
}

TEST(two_honest_sides_agree) {
  Exchange exchange;
  CHECK(exchange.acceptor.hello().has_value());
  checkEqualHellos(*exchange.acceptor.hello(), someHello());
  CHECK_EQ(deliver(exchange.initiator, exchange.welcome), exchange.welcome.size());
  CHECK(exchange.initiator.welcome().has_value());
  CHECK_EQ(exchange.initiator.welcome()->verdict, Verdict::kBusy);
  CHECK_EQ(exchange.initiator.welcome()->reason, "try again");
  for (const Bytes* message : {&exchange.challenge, &exchange.hello, &exchange.welcome}) {
    CHECK(message->size() <= 4 + kHandshakeMessageBytesMax);
  }
}

TEST(bytes_may_arrive_one_by_one) {
  AcceptorHandshake acceptor(kToken, nonceOf(1));
  InitiatorHandshake initiator(kToken, nonceOf(2), someHello());
  const Bytes challenge = acceptor.challenge();
  for (std::size_t i = 0; i < challenge.size(); ++i) {
    CHECK(initiator.hello().empty());
    CHECK_EQ(initiator.receive(&challenge[i], 1), 1);
    CHECK(initiator.heldBytes() <= i + 1);
  }
  const Bytes hello = initiator.hello();
  for (const std::uint8_t byte : hello) {
    CHECK(!acceptor.hello().has_value());
    CHECK_EQ(acceptor.receive(&byte, 1), 1);
    CHECK_EQ(acceptor.receive(nullptr, 0), 0);
  }
  checkEqualHellos(*acceptor.hello(), someHello());
  const Bytes welcome = acceptor.welcome({Verdict::kWelcome, ""});
  for (const std::uint8_t byte : welcome) {
    CHECK(!initiator.welcome().has_value());
    CHECK_EQ(initiator.receive(&byte, 1), 1);
  }
  CHECK_EQ(initiator.welcome()->verdict, Verdict::kWelcome);
  CHECK_EQ(initiator.welcome()->reason, "");
}

TEST(bytes_after_a_message_are_left_alone) {
  Exchange exchange;
  AcceptorHandshake acceptor(kToken, nonceOf(1));
  Bytes stream = exchange.hello;
  stream.insert(stream.end(), 50, 0xff);
  CHECK_EQ(deliver(acceptor, stream), exchange.hello.size());
  CHECK_EQ(deliver(acceptor, stream), 0);  // finished: nothing more is its own
  stream = exchange.challenge;
  stream.insert(stream.end(), exchange.welcome.begin(), exchange.welcome.end());
  stream.push_back(0xff);
  InitiatorHandshake initiator(kToken, nonceOf(100), someHello());
  const std::size_t first = deliver(initiator, stream);
  CHECK_EQ(first, exchange.challenge.size());
  CHECK(!initiator.welcome().has_value());
  CHECK_EQ(initiator.receive(stream.data() + first, stream.size() - first), exchange.welcome.size());
  CHECK(initiator.welcome().has_value());
  CHECK_EQ(deliver(initiator, stream), 0);
}

TEST(every_flipped_bit_of_a_hello_is_refused) {
  const Exchange exchange;
  for (std::size_t bit = 0; bit < 8 * exchange.hello.size(); ++bit) {
    Bytes hello = exchange.hello;
    hello[bit / 8] = static_cast<std::uint8_t>(hello[bit / 8] ^ (1U << (bit % 8)));
    AcceptorHandshake acceptor(kToken, nonceOf(1));
    CHECK_THROWS(deliver(acceptor, hello), HandshakeError);
    CHECK(!acceptor.hello().has_value());
    CHECK_THROWS(acceptor.receive(nullptr, 0), HandshakeError);  // it stays refused
  }
}

TEST(every_flipped_bit_of_a_welcome_is_refused) {
  const Exchange exchange;
  for (std::size_t bit = 0; bit < 8 * exchange.welcome.size(); ++bit) {
    Bytes welcome = exchange.welcome;
    welcome[bit / 8] = static_cast<std::uint8_t>(welcome[bit / 8] ^ (1U << (bit % 8)));
    InitiatorHandshake initiator = waitingInitiator(exchange);
    // A longer length may leave it waiting for bytes that never come; then it must not believe what it has.
    if (bit < 32 && welcome[0] + 256 * welcome[1] <= 292 && welcome[2] == 0 && welcome[3] == 0 &&
        welcome[0] + 256U * welcome[1] > exchange.welcome.size() - 4) {
      deliver(initiator, welcome);
      welcome.assign(300, 0);
    }
    CHECK_THROWS(deliver(initiator, welcome), HandshakeError);
    CHECK(!initiator.welcome().has_value());
  }
}

TEST(every_flipped_bit_of_a_challenge_is_refused_by_one_of_the_two) {
  Exchange exchange;
  for (std::size_t bit = 0; bit < 8 * exchange.challenge.size(); ++bit) {
    Bytes challenge = exchange.challenge;
    challenge[bit / 8] = static_cast<std::uint8_t>(challenge[bit / 8] ^ (1U << (bit % 8)));
    InitiatorHandshake initiator(kToken, nonceOf(100), someHello());
    if (bit / 8 < challenge.size() - sizeof(Nonce)) {
      CHECK_THROWS(deliver(initiator, challenge), HandshakeError);
      CHECK(initiator.hello().empty());
    } else {
      deliver(initiator, challenge);
      AcceptorHandshake acceptor(kToken, nonceOf(1));
      CHECK_THROWS(deliver(acceptor, initiator.hello()), HandshakeError);
    }
  }
}

TEST(truncated_messages_never_complete) {
  const Exchange exchange;
  for (std::size_t size = 0; size < exchange.hello.size(); ++size) {
    AcceptorHandshake acceptor(kToken, nonceOf(1));
    CHECK_EQ(acceptor.receive(exchange.hello.data(), size), size);
    CHECK(!acceptor.hello().has_value());
  }
  for (std::size_t size = 0; size < exchange.welcome.size(); ++size) {
    InitiatorHandshake initiator = waitingInitiator(exchange);
    CHECK_EQ(initiator.receive(exchange.welcome.data(), size), size);
    CHECK(!initiator.welcome().has_value());
  }
}

TEST(oversized_messages_are_refused_at_their_prefix) {
  const Exchange exchange;
  for (const std::uint32_t length : {0U, 1U, 23U, 150U, 1024U, 1025U, 65536U, 0x7fffffffU, 0xffffffffU}) {
    for (std::uint8_t type = 0; type < 5; ++type) {
      const Bytes prefix = {static_cast<std::uint8_t>(length), static_cast<std::uint8_t>(length >> 8),
                            static_cast<std::uint8_t>(length >> 16), static_cast<std::uint8_t>(length >> 24), type};
      if (length == exchange.hello.size() - 4 || (length == 150 && type == 3) || (length == 23 && type == 1)) continue;
      AcceptorHandshake acceptor(kToken, nonceOf(1));
      CHECK_THROWS(deliver(acceptor, prefix), HandshakeError);
      InitiatorHandshake initiator(kToken, nonceOf(1), someHello());
      CHECK_THROWS(deliver(initiator, prefix), HandshakeError);
      InitiatorHandshake waiting = waitingInitiator(exchange);
      CHECK_THROWS(deliver(waiting, prefix), HandshakeError);
    }
  }
}

TEST(reflected_messages_do_not_verify) {
  const Exchange exchange;
  // What a side sent itself, sent back to it; also with the type changed to the one it waits for.
  InitiatorHandshake initiator = waitingInitiator(exchange);
  CHECK_THROWS(deliver(initiator, exchange.hello), HandshakeError);
  Bytes disguised = exchange.hello;
  disguised[4] = 3;
  InitiatorHandshake second = waitingInitiator(exchange);
  CHECK_THROWS(deliver(second, disguised), HandshakeError);
  AcceptorHandshake acceptor(kToken, nonceOf(1));
  CHECK_THROWS(deliver(acceptor, exchange.challenge), HandshakeError);
  AcceptorHandshake other(kToken, nonceOf(1));
  CHECK_THROWS(deliver(other, exchange.welcome), HandshakeError);
}

TEST(replayed_messages_do_not_verify_under_other_nonces) {
  const Exchange exchange;
  AcceptorHandshake acceptor(kToken, nonceOf(2));
  CHECK_THROWS(deliver(acceptor, exchange.hello), HandshakeError);
  InitiatorHandshake other_initiator = waitingInitiator(exchange, 101);
  CHECK_THROWS(deliver(other_initiator, exchange.welcome), HandshakeError);
  InitiatorHandshake other_acceptor(kToken, nonceOf(100), someHello());
  deliver(other_acceptor, acceptor.challenge());
  CHECK_THROWS(deliver(other_acceptor, exchange.welcome), HandshakeError);
}

TEST(another_token_is_refused_by_both) {
  const Exchange exchange;
  for (const char* token : {"", "a token of the jo", "a token of the job ", "A token of the job"}) {
    AcceptorHandshake acceptor(token, nonceOf(1));
    CHECK_THROWS(deliver(acceptor, exchange.hello), HandshakeError);
    CHECK(!acceptor.hello().has_value());
    InitiatorHandshake initiator(token, nonceOf(100), someHello());
    deliver(initiator, exchange.challenge);
    CHECK_THROWS(deliver(initiator, exchange.welcome), HandshakeError);
  }
}

TEST(another_version_is_named_in_the_error) {
  Exchange exchange;
  Bytes challenge = exchange.challenge;
  challenge[9] = 2;  // after length, type and magic
  InitiatorHandshake initiator(kToken, nonceOf(100), someHello());
  try {
    deliver(initiator, challenge);
    CHECK(false);
  } catch (const HandshakeError& error) {
    CHECK(std::string(error.what()).find("found protocol version 2, expected 1") != std::string::npos);
  }
}

TEST(signed_nonsense_is_refused) {
  Hello hello = someHello();
  for (const int purpose : {0, 4, 255}) {
    hello.purpose = static_cast<Purpose>(purpose);
    AcceptorHandshake acceptor(kToken, nonceOf(1));
    InitiatorHandshake initiator(kToken, nonceOf(2), hello);
    deliver(initiator, acceptor.challenge());
    CHECK_THROWS(deliver(acceptor, initiator.hello()), HandshakeError);
  }
  for (const bool from : {true, false}) {
    hello = someHello();
    (from ? hello.from_rank : hello.to_rank) = -1;
    AcceptorHandshake acceptor(kToken, nonceOf(1));
    InitiatorHandshake initiator(kToken, nonceOf(2), hello);
    deliver(initiator, acceptor.challenge());
    CHECK_THROWS(deliver(acceptor, initiator.hello()), HandshakeError);
  }
  Exchange exchange({static_cast<Verdict>(8), ""});
  CHECK_THROWS(deliver(exchange.initiator, exchange.welcome), HandshakeError);
}

TEST(a_signed_reason_length_that_is_wrong_is_refused) {
  const Exchange exchange;
  for (const int off : {-1, 1, 255}) {
    Bytes welcome = exchange.welcome;
    welcome[6] = static_cast<std::uint8_t>(welcome[6] + off);
    const std::size_t covered = welcome.size() - sizeof(Digest);
    std::string signed_text = "trainmover handshake WELCOME";
    for (const Nonce& nonce : {nonceOf(1), nonceOf(100)}) signed_text.append(nonce.begin(), nonce.end());
    signed_text.append(welcome.begin(), welcome.begin() + static_cast<std::ptrdiff_t>(covered));
    const Digest digest = hmacSha256(kToken, signed_text.data(), signed_text.size());
    std::copy(digest.begin(), digest.end(), welcome.begin() + static_cast<std::ptrdiff_t>(covered));
    InitiatorHandshake initiator = waitingInitiator(exchange);
    try {
      deliver(initiator, welcome);
      CHECK(false);
    } catch (const HandshakeError& error) {
      CHECK(std::string(error.what()).find("says its reason has") != std::string::npos);
    }
    CHECK(!initiator.welcome().has_value());
  }
}

TEST(long_reasons_are_cut) {
  Exchange exchange({Verdict::kWrongJob, std::string(1000, 'x')});
  deliver(exchange.initiator, exchange.welcome);
  CHECK_EQ(exchange.initiator.welcome()->reason, std::string(256, 'x'));
}

TEST(welcome_before_hello_is_a_mistake_of_ours) {
  const AcceptorHandshake acceptor(kToken, nonceOf(1));
  CHECK_THROWS(acceptor.welcome({}), std::logic_error);
}

TEST(every_verdict_has_a_name_of_its_own) {
  std::vector<std::string> names;
  for (int verdict = 0; verdict <= 7; ++verdict) names.emplace_back(nameOf(static_cast<Verdict>(verdict)));
  std::sort(names.begin(), names.end());
  CHECK(std::unique(names.begin(), names.end()) == names.end());
}

}  // namespace
