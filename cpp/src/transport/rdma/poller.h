// Poller: the thread that looks at the completion queues of all rails, and sleeps when they are idle.
//
// Whoever waits looks too, which is faster; this thread then keeps out of the way.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "transport/rdma/rail.h"

namespace kvzc::rdma {

class RdmaChannel;

class Poller {
 public:
  Poller(std::vector<std::unique_ptr<Rail>> rails, OperationSink& operations)
      : rails_(std::move(rails)), operations_(operations) {}
  ~Poller() { stop(); }
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  Status start();
  void stop();

  const std::vector<std::unique_ptr<Rail>>& rails() const { return rails_; }
  // Looks once at every rail, for a thread that waits. Gives how much there was. Thread: any.
  int help();
  // Looks until none has anything, also where another thread is at it.
  void settle();

  // Channels hear of ports that go down.
  void add(RdmaChannel* channel);
  void remove(RdmaChannel* channel);

 private:
  void run();
  int look();
  void sleep();
  void on_async_events(Rail& rail);

  const std::vector<std::unique_ptr<Rail>> rails_;
  OperationSink& operations_;
  OwnedFd wake_;
  std::thread thread_;
  std::atomic<bool> is_stopping_{false};
  std::atomic<std::int64_t> helped_ns_{0};
  std::mutex channels_mutex_;
  std::set<RdmaChannel*> channels_;  // Guarded by channels_mutex_.
};

}  // namespace kvzc::rdma
