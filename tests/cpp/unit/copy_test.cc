#include "base/copy.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

constexpr std::size_t kGuardBytes = 64;
constexpr std::byte kGuard{0xa5};

// Copies between buffers that are aligned to a page plus the given shift, with guard bytes on both
// sides of the target, and checks every byte. The source ends where its buffer does, so that ASan
// sees a read beyond it.
class CopyBench {
 public:
  explicit CopyBench(std::size_t most) : pattern_(test::Random(42).bytes(most)) {
    target_.resize(most + 4 * kGuardBytes);
  }

  ::testing::AssertionResult copy(std::size_t nbytes, std::size_t source_shift,
                                  std::size_t target_shift, bool streaming) {
    source_.reset(new (std::align_val_t{64}) std::byte[source_shift + nbytes]);
    std::byte* source = source_.get() + source_shift;
    std::memcpy(source, pattern_.data(), nbytes);
    const std::size_t aligned = (64 - reinterpret_cast<std::uintptr_t>(target_.data()) % 64) % 64;
    std::byte* target = target_.data() + aligned + kGuardBytes + target_shift;
    std::memset(target - kGuardBytes, static_cast<int>(kGuard), nbytes + 2 * kGuardBytes);
    copy_bytes(target, source, nbytes, streaming);
    copy_fence();
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    const bool is_right = std::memcmp(target, pattern_.data(), nbytes) == 0 &&
                          std::all_of(target - kGuardBytes, target, is_guard) &&
                          std::all_of(target + nbytes, target + nbytes + kGuardBytes, is_guard) &&
                          std::memcmp(source, pattern_.data(), nbytes) == 0;
    if (is_right) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << nbytes << " bytes from a source at " << source_shift << " to a target at "
           << target_shift << " mod 64, streaming " << streaming << ", kernel " << copy_kernel();
  }

 private:
  struct AlignedDelete {
    void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  std::vector<std::byte> pattern_;
  std::vector<std::byte> target_;
  std::unique_ptr<std::byte[], AlignedDelete> source_;
};

TEST(Copy, CopiesExactlyTheBytesOfEverySize) {
  CopyBench bench(8192);
  test::Random random(5);
  KVZC_TRACE_SEED(random);
  for (std::size_t nbytes = 0; nbytes <= 5000; ++nbytes) {
    for (const bool streaming : {false, true}) {
      ASSERT_TRUE(bench.copy(nbytes, 0, 0, streaming));
      ASSERT_TRUE(bench.copy(nbytes, static_cast<std::size_t>(random.between(0, 63)),
                             static_cast<std::size_t>(random.between(0, 63)), streaming));
    }
  }
}

TEST(Copy, CopiesExactlyTheBytesAtEveryAlignmentOfBothSides) {
  CopyBench bench(8192);
  // Around the least that is streamed, and around whole turns of the kernels after any head.
  for (const std::size_t nbytes : {std::size_t{1}, std::size_t{65}, std::size_t{2047},
                                   std::size_t{2048}, std::size_t{2304}, std::size_t{2367}}) {
    for (std::size_t source = 0; source < 64; ++source) {
      for (std::size_t target = 0; target < 64; ++target) {
        ASSERT_TRUE(bench.copy(nbytes, source, target, true));
        if (target % 16 == source % 16) {
          ASSERT_TRUE(bench.copy(nbytes, source, target, false));
        }
      }
    }
  }
}

TEST(Copy, CopiesLargePieces) {
  CopyBench bench((8u << 20) + 4096);
  for (const std::size_t nbytes :
       {std::size_t{256} << 10, (std::size_t{1} << 20) - 1, (std::size_t{8} << 20) + 255}) {
    for (const bool streaming : {false, true}) {
      ASSERT_TRUE(bench.copy(nbytes, 0, 0, streaming));
      ASSERT_TRUE(bench.copy(nbytes, 3, 61, streaming));
    }
  }
}

TEST(Copy, NamesItsKernel) {
  EXPECT_TRUE(std::string_view(copy_kernel()) == "avx512" ||
              std::string_view(copy_kernel()) == "avx2" ||
              std::string_view(copy_kernel()) == "memcpy")
      << copy_kernel();
}

}  // namespace
}  // namespace kvzc
