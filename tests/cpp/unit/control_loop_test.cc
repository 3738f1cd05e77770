#include "core/control_loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

// Both are seen to be readable at once. Whose handler comes first closes the other, and another file, of
// which there is nothing to tell, gets its number.
TEST(ControlLoop, TellsAHandlerNothingOfWhatHadItsDescriptorBefore) {
  ControlLoop loop;
  ASSERT_TRUE(loop.start().is_ok());
  std::array<OwnedFd, 2> fds;
  std::array<std::atomic<int>, 2> first{}, later{};
  std::atomic<bool> is_done{false};
  for (OwnedFd& fd : fds) fd = OwnedFd(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
  ASSERT_TRUE(loop.post([&] {
    for (std::size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(loop.watch(fds[i].get(), EPOLLIN, [&, i](std::uint32_t) {
                        ++first[i];
                        loop.unwatch(fds[i].get());
                        const std::size_t other = 1 - i;
                        const int number = fds[other].get();
                        loop.unwatch(number);
                        const OwnedFd quiet(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
                        ASSERT_EQ(dup3(quiet.get(), number, O_CLOEXEC), number);
                        ASSERT_TRUE(loop.watch(number, EPOLLIN, [&, other](std::uint32_t) {
                                          ++later[other];
                                        }).is_ok());
                        loop.run_at(0, [&] { is_done = true; });
                      }).is_ok());
    }
  }));
  for (int looks = 0; looks < 20'000 && !is_done; ++looks) usleep(1000);
  EXPECT_TRUE(is_done);
  loop.stop();
  EXPECT_EQ(first[0] + first[1], 1);
  EXPECT_EQ(later[0] + later[1], 0);
}

}  // namespace
}  // namespace kvzc
