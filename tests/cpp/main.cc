// Runs the tests of one executable: all, or those whose name contains the first argument. A line for each; exits 1 when
// any failed or none was found. Called by test_cpp.py, and by hand.
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>

#include "check.h"

namespace {

/// The reason why the test failed, empty when it passed.
std::string run(const trainmover::check::TestCase& test) {
  try {
    test.body();
  } catch (const trainmover::check::Failure& failure) {
    return failure.what;
  } catch (const std::exception& error) {
    return std::string("threw: ") + error.what();
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  int ran = 0;
  int failed = 0;
  for (const trainmover::check::TestCase& test : trainmover::check::testCases()) {
    if (test.name.find(wanted) == std::string::npos) continue;
    const auto start = std::chrono::steady_clock::now();
    const std::string why = run(test);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    ++ran;
    if (!why.empty()) ++failed;
    std::printf("%s %s (%.0f ms)%s%s\n", why.empty() ? "ok  " : "FAIL", test.name.c_str(), took.count(),
                why.empty() ? "" : "\n     ", why.c_str());
    std::fflush(stdout);
  }
  std::printf("%d run, %d failed\n", ran, failed);
  if (ran == 0) std::printf("no test's name contains '%s'\n", wanted.c_str());
  return failed > 0 || ran == 0 ? 1 : 0;
}
