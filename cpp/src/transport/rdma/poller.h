// Poller: the thread that looks at the completion queues of all rails when nobody else does.
//
// Whoever waits looks too, which is faster, and a thread that is woken for what another has seen
// already only takes time from both. So this one keeps out of the way of threads that are active:
//
//   nobody is active       it sleeps until the next completion, of whatever kind
//   somebody posts         it sleeps until a message comes, and else looks every 1 to 8 ms
//   ... and looks          the same; what it finds then was not left alone, and it looks every 8 ms
//   ... and takes messages it does neither for 1 ms: they are seen by whoever looks
//   somebody sleeps        as if nobody were active: what is slept for is taken at once
//   somebody rests         as if nobody looked: a message wakes it
//
// Whoever waits looks, and whoever posts looks once in 16 posts. A thread that gives up looking before
// its transfer has ended says that it sleeps; one that gives up before a message has come, that it
// rests; and an owner's question counts as a sleeper until it is answered. Only what was posted and
// left alone is seen late, by as much: the longer the less there was of it.
//
// With channels it wakes once in RdmaChannel::kWatchNs and has them look for rails that lead nowhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "transport/rdma/rail.h"

namespace kvzc::rdma {

class RdmaChannel;

class Poller {
 public:
  Poller(std::vector<std::unique_ptr<Rail>> rails, TransportHost& host)
      : rails_(std::move(rails)), operations_(host.operations), doorbell_(host.doorbell) {}
  ~Poller() { stop(); }
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  Status start();
  void stop();

  const std::vector<std::unique_ptr<Rail>>& rails() const { return rails_; }
  // Looks once at every rail. Gives how much there was. Thread: any.
  int look();
  // The same for a thread that will look again, or say add_sleeper() or begin_rest(). Thread: any.
  int help() {
    mark(looks_);
    return look();
  }
  // Somebody posts / has taken a message. Thread: any. Cost: a load and a store.
  void mark_active() { mark(posts_); }
  void mark_message() { mark(messages_); }
  // Somebody sleeps until something has ended, and does not look any more / it has ended.
  // Thread: any.
  void add_sleeper();
  void remove_sleeper() { sleepers_.fetch_sub(1, std::memory_order_relaxed); }
  // Somebody sleeps until a message comes, and does not look any more / is awake. Thread: any.
  void begin_rest();
  void end_rest() { resting_.fetch_sub(1, std::memory_order_relaxed); }
  // The engine's descriptor was armed, for somebody who sleeps on it. Thread: any.
  void see_to_messages();
  // Looks once at every rail, and waits where another thread is at it: whatever had come is handed on
  // when this returns. Gives whether there was anything. Thread: any, without a rail's lock.
  bool look_surely();
  // Looks until none has anything, also where another thread is at it.
  void settle();

  // Channels hear of ports that go down.
  void add(RdmaChannel* channel);
  void remove(RdmaChannel* channel);

 private:
  void run();
  bool is_somebody_active();
  static bool has_changed(const std::atomic<std::uint32_t>& marks, std::uint32_t& seen);
  void look_until_idle();
  // Sleeps until something comes, whatever it is / until a message comes, and not for long.
  void sleep();
  void nap();
  // The same without asking for events; gives whether that was sound.
  bool nap_unarmed();
  void doze();
  void wake();
  void sleep_armed(std::int64_t timeout_ns);
  void on_async_events(Rail& rail);
  void watch();
  std::uint32_t activity() const {
    return posts_.load(std::memory_order_relaxed) + looks_.load(std::memory_order_relaxed);
  }
  const std::vector<std::unique_ptr<Rail>> rails_;
  // A mark that is lost does no harm.
  static void mark(std::atomic<std::uint32_t>& marks) {
    marks.store(marks.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  OperationSink& operations_;
  Doorbell& doorbell_;
  OwnedFd wake_;
  std::thread thread_;
  std::atomic<bool> is_stopping_{false};
  std::atomic<std::uint32_t> posts_{0};  // Counts marks, roughly,
  std::atomic<std::uint32_t> looks_{0};  // and so do this
  std::atomic<std::uint32_t> messages_{0};  // and this.
  std::uint32_t seen_activity_ = 0;      // The poller's own, ...
  std::uint32_t seen_looks_ = 0;         // ... and so are these.
  std::uint32_t seen_messages_ = 0;
  std::int64_t active_until_ns_ = 0;
  std::int64_t nap_ns_ = 0;
  std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<std::uint32_t> resting_{0};
  std::atomic<bool> is_napping_{false};  // A sleeper wakes it then,
  std::atomic<bool> is_unarmed_{false};  // and whoever rests then.
  Mutex channels_mutex_;
  std::set<RdmaChannel*> channels_ KVZC_GUARDED_BY(channels_mutex_);
  std::atomic<std::int64_t> next_watch_ns_{INT64_MAX};  // Set under it.
};

}  // namespace kvzc::rdma
