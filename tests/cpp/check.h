// A test harness in one header: TEST(name) { ... } registers a test, main.cc runs them. A failed check throws, so that
// a test ends at its first failure; checks made on another thread must be carried back by the test itself.
#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace trainmover::check {

/// What a failed check throws. Not a std::exception, so that code under test doesn't swallow it.
struct Failure {
  std::string what;
};

struct TestCase {
  std::string name;
  std::function<void()> body;
};

/// All tests of this executable, in the order in which they were registered.
inline std::vector<TestCase>& testCases() {
  static std::vector<TestCase> cases;
  return cases;
}

struct Registration {
  Registration(const char* name, std::function<void()> body) { testCases().push_back({name, std::move(body)}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure{std::string(file) + ":" + std::to_string(line) + ": " + what};
}

template <typename T, typename = void>
struct Printable : std::false_type {};
template <typename T>
struct Printable<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<const T&>())>> : std::true_type {
};

/// Numbers for enums and bytes, the value where it can be printed, else a placeholder.
template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_same_v<T, std::nullptr_t>) {
    out << "nullptr";
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1) {
    out << static_cast<int>(value);
  } else if constexpr (Printable<T>::value) {
    out << value;
  } else {
    out << "(" << sizeof(T) << " bytes that cannot be printed)";
  }
  return out.str();
}

/// Equal as values: integers of different signedness are compared by value, never converted.
template <typename A, typename B>
bool equalValues(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B>) {
    if constexpr (std::is_signed_v<A> && !std::is_signed_v<B>) {
      if (a < 0) return false;
    } else if constexpr (!std::is_signed_v<A> && std::is_signed_v<B>) {
      if (b < 0) return false;
    }
    using Common = std::common_type_t<A, B>;
    return static_cast<Common>(a) == static_cast<Common>(b);
  } else {
    return a == b;
  }
}

template <typename A, typename B>
void checkEqual(const A& a, const B& b, const char* a_text, const char* b_text, const char* file, int line) {
  if (equalValues(a, b)) return;
  fail(file, line, std::string(a_text) + " == " + b_text + " is false: " + show(a) + " against " + show(b));
}

}  // namespace trainmover::check

/// A test; the body follows.
#define TEST(name)                                                                              \
  static void test_##name();                                                                    \
  static const ::trainmover::check::Registration test_registration_##name(#name, &test_##name); \
  static void test_##name()

/// Ends the test unless the condition holds.
#define CHECK(...)                                                                                \
  do {                                                                                            \
    if (!(__VA_ARGS__)) ::trainmover::check::fail(__FILE__, __LINE__, "not true: " #__VA_ARGS__); \
  } while (false)

/// Ends the test unless both are equal; prints both.
#define CHECK_EQ(a, b) ::trainmover::check::checkEqual((a), (b), #a, #b, __FILE__, __LINE__)

/// Ends the test unless evaluating `expression` throws `Type`.
#define CHECK_THROWS(expression, Type)                                                                             \
  do {                                                                                                             \
    bool check_threw = false;                                                                                      \
    try {                                                                                                          \
      static_cast<void>(expression);                                                                               \
    } catch (const Type&) {                                                                                        \
      check_threw = true;                                                                                          \
    } catch (const std::exception& other) {                                                                        \
      ::trainmover::check::fail(__FILE__, __LINE__,                                                                \
                                std::string("expected " #Type " from " #expression ", got: ") + other.what());     \
    }                                                                                                              \
    if (!check_threw) ::trainmover::check::fail(__FILE__, __LINE__, "expected " #Type ", got none: " #expression); \
  } while (false)
