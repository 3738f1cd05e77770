// Runs the conformance suite. A skip that tests/cpp/skips.txt does not declare, with a reason,
// fails the run; so does a declared one that was not needed.

#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <string>

namespace {

// Lines "suite.test/case: reason"; '#' begins a comment.
std::map<std::string, std::string> declared_skips() {
  std::map<std::string, std::string> out;
  std::ifstream file(KVZC_SKIPS_FILE);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.empty() || line[0] == '#' || colon == std::string::npos) continue;
    out[line.substr(0, colon)] = line.substr(colon + 2);
  }
  return out;
}

class SkipWatch : public ::testing::EmptyTestEventListener {
 public:
  bool is_as_declared() const {
    bool is_right = true;
    for (const std::string& test : skipped_) {
      if (declared_.contains(test)) continue;
      std::cout << "undeclared skip: " << test << "\n";
      is_right = false;
    }
    for (const std::string& test : passed_) {
      if (!declared_.contains(test)) continue;
      std::cout << "declared as a skip, but it ran: " << test << "\n";
      is_right = false;
    }
    return is_right;
  }

 private:
  void OnTestEnd(const ::testing::TestInfo& info) override {
    const std::string name = std::string(info.test_suite_name()) + "." + info.name();
    (info.result()->Skipped() ? skipped_ : passed_).insert(name);
  }

  std::map<std::string, std::string> declared_ = declared_skips();
  std::set<std::string> skipped_;
  std::set<std::string> passed_;
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  auto* const watch = new SkipWatch;  // The listeners own it.
  ::testing::UnitTest::GetInstance()->listeners().Append(watch);
  const int outcome = RUN_ALL_TESTS();
  return outcome != 0 || !watch->is_as_declared() ? 1 : 0;
}
