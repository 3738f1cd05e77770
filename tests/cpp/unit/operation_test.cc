// Operations: the first failure is the one that is told.
#include "kvzc/transport.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace kvzc {
namespace {

TEST(Operation, TheFirstFailureStays) {
  Operation operation;
  EXPECT_FALSE(operation.has_failed());
  EXPECT_TRUE(operation.failure().is_ok());
  operation.fail(Status(Code::kRevoked, "the first cause"));
  operation.fail(Status(Code::kPeerLost, "what came of it"));
  operation.fail(Status(Code::kCancelled, "and then it was cancelled"));
  EXPECT_TRUE(operation.has_failed());
  EXPECT_EQ(operation.failure().code(), Code::kRevoked);
  EXPECT_EQ(operation.failure().text(), "the first cause");
  // An operation that is used again has its own.
  operation.clear_failure();
  EXPECT_FALSE(operation.has_failed());
  operation.fail(Status(Code::kCancelled, "another"));
  EXPECT_EQ(operation.failure().code(), Code::kCancelled);
}

TEST(Operation, OfManyFailuresAtOnceOneStays) {
  for (int round = 0; round < 200; ++round) {
    Operation operation;
    std::atomic<bool> go{false};
    std::vector<std::string> seen(3);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < seen.size(); ++t) {
      threads.emplace_back([&, t] {
        while (!go.load()) std::this_thread::yield();
        operation.fail(Status(Code::kSystem, "cause " + std::to_string(t)));
        seen[t] = operation.failure().text();
      });
    }
    go.store(true);
    for (std::thread& thread : threads) thread.join();
    // Whoever has looked has seen what all see.
    for (const std::string& text : seen) ASSERT_EQ(text, operation.failure().text());
  }
}

}  // namespace
}  // namespace kvzc
