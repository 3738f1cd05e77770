// A system under test: one way to make engines that every promise is checked against.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvzc/engine.h"

namespace kvzc::conformance {

struct Sut {
  std::string name;
  std::function<EngineOptions()> options;
};

// Each is defined in one small file of tests/cpp/sut.
Sut sut_shm();
Sut sut_shm_small_chunks();

inline std::vector<Sut> all_suts() { return {sut_shm(), sut_shm_small_chunks()}; }

}  // namespace kvzc::conformance
