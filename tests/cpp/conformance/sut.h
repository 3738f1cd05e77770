// A system under test: one way to make engines that every promise is checked against.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvzc/engine.h"
#include "kvzc/info.h"

namespace kvzc::conformance {

// What the owner's memory is in the tests.
enum class MemoryKind {
  kSharable,  // As kvzc.empty() gives it.
  kPrivate    // As malloc() does.
};

struct Sut {
  std::string name;
  std::function<EngineOptions()> options;
  MemoryKind memory = MemoryKind::kSharable;
  bool is_remote = false;  // Nothing is mapped, and for a fence the peer is asked.
  bool between_hosts = false;  // Handles lead to TCP addresses alone.
};

// Each is defined in one small file of tests/cpp/sut.
Sut sut_shm();
Sut sut_shm_small_chunks();
Sut sut_shm_private();
Sut sut_fault();
Sut sut_rdma();
Sut sut_rdma_small();
Sut sut_rdma_hosts();

// Those that this machine can run.
inline std::vector<Sut> all_suts() {
  std::vector<Sut> suts{sut_shm(), sut_shm_small_chunks(), sut_shm_private(), sut_fault()};
  for (const TransportInfo& info : list_transports()) {
    if (info.name != "rdma" || !info.is_available) continue;
    suts.push_back(sut_rdma());
    suts.push_back(sut_rdma_small());
    suts.push_back(sut_rdma_hosts());
  }
  return suts;
}

}  // namespace kvzc::conformance
