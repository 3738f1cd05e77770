#include "core/binding.h"

#include <atomic>
#include <thread>
#include <vector>

#include "core/endpoint.h"
#include "gtest/gtest.h"

namespace kvzc {
namespace {

Status gone() { return Status(Code::kPeerLost, "gone"); }

TEST(BindingVisit, SeesNothingUntilItIsResolvedAndAfterItHasFailed) {
  Binding binding{HandleInfo()};
  EXPECT_EQ(Binding::Visit(binding).resolved(), nullptr);
  const auto form = std::make_shared<const Binding::Resolved>();
  (void)binding.resolve(form);
  EXPECT_EQ(Binding::Visit(binding).resolved(), form.get());
  (void)binding.fail(gone(), Binding::kAtOnce);
  EXPECT_EQ(Binding::Visit(binding).resolved(), nullptr);
  EXPECT_FALSE(binding.has_visitors());
}

TEST(BindingVisit, KeepsTheFormThatItHasSeen) {
  Binding binding{HandleInfo()};
  auto form = std::make_shared<const Binding::Resolved>();
  const std::weak_ptr<const Binding::Resolved> seen = form;
  (void)binding.resolve(std::move(form));
  {
    const Binding::Visit visit(binding);
    (void)binding.fail(gone(), Binding::kAtOnce);
    EXPECT_TRUE(binding.has_visitors());
    EXPECT_FALSE(seen.expired());
    {
      const Binding::Visit other(binding);
      EXPECT_EQ(other.resolved(), nullptr);
    }
    EXPECT_FALSE(seen.expired()) << "not the last visitor has left";
    (void)binding.resolve(std::make_shared<const Binding::Resolved>());
    EXPECT_FALSE(seen.expired());
  }
  EXPECT_TRUE(seen.expired());
  EXPECT_NE(Binding::Visit(binding).resolved(), nullptr) << "the new form stays";
}

TEST(BindingVisit, WithoutVisitorsAFailureLetsGoAtOnce) {
  Binding binding{HandleInfo()};
  auto form = std::make_shared<const Binding::Resolved>();
  const std::weak_ptr<const Binding::Resolved> seen = form;
  (void)binding.resolve(std::move(form));
  (void)binding.fail(gone(), Binding::kNever);
  EXPECT_TRUE(seen.expired());
}

TEST(BindingVisit, ManyVisitorsAndManyFailuresLoseNothing) {
  constexpr int kForms = 2000;
  Binding binding{HandleInfo()};
  std::vector<std::weak_ptr<const Binding::Resolved>> all;
  std::atomic<bool> is_over{false};
  std::atomic<std::uint64_t> sum{0};
  std::vector<std::thread> visitors;
  for (int i = 0; i < 3; ++i) {
    visitors.emplace_back([&] {
      while (!is_over.load()) {
        const Binding::Visit visit(binding);
        // Read: a sanitizer sees what is read after it was freed.
        if (visit.resolved() != nullptr) sum.fetch_add(visit.resolved()->fence.epoch);
      }
    });
  }
  for (int i = 0; i < kForms; ++i) {
    auto form = std::make_shared<Binding::Resolved>();
    form->fence.epoch = 1;
    all.push_back(form);
    (void)binding.resolve(std::move(form));
    (void)binding.fail(gone(), Binding::kAtOnce);
  }
  is_over.store(true);
  for (std::thread& visitor : visitors) visitor.join();
  (void)binding.fail(gone(), Binding::kAtOnce);
  for (const auto& each : all) EXPECT_TRUE(each.expired());
}

}  // namespace
}  // namespace kvzc
