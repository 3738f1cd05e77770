#include "kvzc/completion_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/shared_memory.h"

namespace kvzc {
namespace {

// A waiter helps one transfer for so long before it looks whether another has ended.
constexpr std::int64_t kHelpSliceNs = 200'000;

Status closed() { return Status(Code::kClosed, "the completion queue is closed"); }

Status forked() {
  return Status(Code::kForkedEngine,
                "this completion queue was made before fork() and belongs to the parent process; make "
                "another one here");
}

}  // namespace

// One transfer on its way to becoming an entry.
struct CompletionQueue::Place::Node : TransferState::Watch {
  std::shared_ptr<Shared> shared;
  Entry entry;
  std::list<Node>::iterator self;
  bool is_listed = false;  // Among those that run; an end that comes before is only noted.
  bool has_ended = false;
};

class CompletionQueue::Place::Shared : public std::enable_shared_from_this<Shared> {
 public:
  // Nodes stay where they are: they go from list to list.
  using Nodes = std::list<Node>;

  explicit Shared(std::size_t depth) : depth_(depth) {}

  Result<Place> reserve() {
    if (fork_guard_.is_forked_child()) return forked();
    const MutexLock lock(mutex_);
    if (is_closed_) return closed();
    if (used_ == depth_) {
      return Status(Code::kWouldBlock,
                    "the completion queue is full: " + std::to_string(ended_.size()) +
                        " ended transfers wait to be taken and " +
                        std::to_string(used_ - ended_.size()) + " run, of a depth of " +
                        std::to_string(depth_) + "; poll() it, or make a deeper one");
    }
    ++used_;
    return Place(shared_from_this());
  }

  void give_back_place() {
    if (fork_guard_.is_forked_child()) return;
    const MutexLock lock(mutex_);
    --used_;
    room_.notify_one();
  }

  void wait_for_room(std::int64_t deadline_ns) {
    if (is_foreign()) return;
    UniqueLock lock(mutex_);
    wait_until(room_, lock, deadline_ns,
               [this]() KVZC_REQUIRES(mutex_) { return is_closed_ || used_ < depth_; });
  }

  void add(Transfer transfer, Label label) {
    Nodes one(1);
    Node& node = one.front();
    node.shared = shared_from_this();
    node.self = one.begin();
    node.on_end = [](TransferState::Watch& watch) {
      auto& ended = static_cast<Node&>(watch);
      const std::shared_ptr<Shared> shared = ended.shared;  // Whoever takes the node may be the last.
      shared->on_end(ended);
    };
    node.entry = {transfer, std::move(label)};
    transfer.watch(node);
    {
      const MutexLock lock(mutex_);
      if (!is_closed_ && node.has_ended) return append_ended(one);
      if (!is_closed_) {
        node.is_listed = true;
        running_.splice(running_.end(), one);
        const bool is_slept_for = sleepers_ > 0 || event_.is_valid();
        if (!is_slept_for) {
          if (untold_ == running_.end()) untold_ = node.self;
          return;
        }
      } else {
        --used_;
      }
    }
    if (one.empty()) return transfer.will_sleep();
    transfer.unwatch(node);
  }

  Result<std::vector<Entry>> take(std::size_t most) {
    if (fork_guard_.is_forked_child()) return forked();
    const MutexLock lock(mutex_);
    if (is_closed_) return closed();
    return take_locked(most);
  }

  Result<std::vector<Entry>> wait(std::size_t most, std::int64_t deadline_ns) {
    if (fork_guard_.is_forked_child()) return forked();
    UniqueLock lock(mutex_);
    for (;;) {
      if (is_closed_) return closed();
      if (!ended_.empty()) return take_locked(most);
      const std::int64_t now = now_ns();
      if (now >= deadline_ns) {
        return Status(Code::kTimedOut, "no transfer of the completion queue has ended in time; " +
                                           std::to_string(running_.size()) + " run on");
      }
      Transfer oldest;
      if (!running_.empty()) {
        // The oldest, and not for long: another may end before it.
        oldest = running_.front().entry.transfer;
        lock.unlock();
        oldest.help(std::min(deadline_ns, now + kHelpSliceNs));
        lock.lock();
      }
      if (ended_.empty()) {
        const std::int64_t start = now_ns();
        ++sleepers_;
        say_that_it_sleeps();
        wait_until(came_, lock, std::min(deadline_ns, start + kMostSleepNs),
                   [this]() KVZC_REQUIRES(mutex_) { return is_closed_ || !ended_.empty(); });
        --sleepers_;
        if (oldest.is_valid()) oldest.count_wait(now_ns() - start);
      }
      lock.unlock();
      oldest = Transfer();  // It may be the last to hold an engine, which is not ended under the lock.
      lock.lock();
    }
  }

  Result<int> fd() {
    if (fork_guard_.is_forked_child()) return forked();
    UniqueLock lock(mutex_);
    if (is_closed_) return closed();
    if (!event_.is_valid()) {
      event_ = OwnedFd(eventfd(ended_.empty() ? 0 : 1, EFD_CLOEXEC | EFD_NONBLOCK));
      if (!event_.is_valid()) return too_many_files("a descriptor for the completion queue");
    }
    // Whoever uses it sleeps without saying so.
    const int out = event_.get();
    say_that_it_sleeps();
    return out;
  }

  bool is_foreign() const { return fork_guard_.is_forked_child(); }

  void close() {
    if (is_foreign()) return;
    Nodes left, taken;
    {
      const MutexLock lock(mutex_);
      if (std::exchange(is_closed_, true)) return;
      left.splice(left.end(), running_);
      untold_ = running_.end();
      taken.splice(taken.end(), ended_);
      used_ -= left.size() + taken.size();
      if (event_.is_valid()) set_event();  // Who polls hears of it.
      came_.notify_all();
      room_.notify_all();
    }
    // An end that is being told waits for the mutex, finds the queue closed and leaves the node alone.
    for (Node& node : left) node.entry.transfer.unwatch(node);
  }

  std::size_t depth() const { return depth_; }
  std::size_t running() const {
    if (is_foreign()) return 0;
    const MutexLock lock(mutex_);
    return running_.size();
  }
  std::size_t ended() const {
    if (is_foreign()) return 0;
    const MutexLock lock(mutex_);
    return ended_.size();
  }
  bool is_closed() const {
    if (is_foreign()) return true;
    const MutexLock lock(mutex_);
    return is_closed_;
  }

 private:
  // Within that a waiter helps again: what was begun meanwhile may need it.
  static constexpr std::int64_t kMostSleepNs = 100'000'000;

  // Called by the thread that ends the transfer, which holds its state.
  void on_end(Node& node) {
    const MutexLock lock(mutex_);
    if (is_closed_) return;
    if (!node.is_listed) {
      node.has_ended = true;
      return;
    }
    if (untold_ == node.self) ++untold_;
    Nodes one;
    one.splice(one.end(), running_, node.self);
    append_ended(one);
  }

  void append_ended(Nodes& one) KVZC_REQUIRES(mutex_) {
    if (ended_.empty() && event_.is_valid()) set_event();
    ended_.splice(ended_.end(), one);
    came_.notify_one();
  }

  std::vector<Entry> take_locked(std::size_t most) KVZC_REQUIRES(mutex_) {
    std::vector<Entry> out;
    out.reserve(std::min(most, ended_.size()));
    while (out.size() < most && !ended_.empty()) {
      out.push_back(std::move(ended_.front().entry));
      ended_.pop_front();
      --used_;
    }
    if (ended_.empty()) clear_event();
    if (!out.empty()) room_.notify_all();
    return out;
  }

  // Tells the channels of all that run. Lets go of the lock meanwhile.
  void say_that_it_sleeps() KVZC_REQUIRES(mutex_) {
    std::vector<Transfer> untold;
    for (; untold_ != running_.end(); ++untold_) untold.push_back(untold_->entry.transfer);
    if (untold.empty()) return;
    const MutexUnlock meanwhile(mutex_);
    for (const Transfer& each : untold) each.will_sleep();
    untold.clear();
  }

  template <typename Predicate>
  static void wait_until(std::condition_variable_any& what, UniqueLock<Mutex>& lock,
                         std::int64_t deadline_ns, Predicate is_there) {
    const std::int64_t left = std::min(deadline_ns - now_ns(), std::int64_t{3'600'000'000'000});
    what.wait_for(lock, std::chrono::nanoseconds(left), is_there);
  }

  void set_event() const KVZC_REQUIRES(mutex_) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_.get(), &one, sizeof one);
  }
  void clear_event() const KVZC_REQUIRES(mutex_) {
    if (!event_.is_valid()) return;
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(event_.get(), &count, sizeof count);
  }

  const std::size_t depth_;
  const ForkGuard fork_guard_;
  mutable Mutex mutex_;  // Guards the rest. Nothing of a transfer is called under it.
  std::condition_variable_any came_;
  std::condition_variable_any room_;
  Nodes running_ KVZC_GUARDED_BY(mutex_);  // In the order in which they were added.
  // From here on channels do not know that they are slept for.
  Nodes::iterator untold_ KVZC_GUARDED_BY(mutex_) = running_.end();
  Nodes ended_ KVZC_GUARDED_BY(mutex_);
  std::size_t used_ KVZC_GUARDED_BY(mutex_) = 0;  // Places that were given, running and ended ones among them.
  int sleepers_ KVZC_GUARDED_BY(mutex_) = 0;
  bool is_closed_ KVZC_GUARDED_BY(mutex_) = false;
  OwnedFd event_ KVZC_GUARDED_BY(mutex_);
};

CompletionQueue::Place::~Place() {
  if (shared_) shared_->give_back_place();
}
CompletionQueue::Place::Place(Place&&) noexcept = default;
CompletionQueue::Place& CompletionQueue::Place::operator=(Place other) noexcept {
  std::swap(shared_, other.shared_);
  return *this;
}

void CompletionQueue::Place::fill(Transfer transfer, Label label) && {
  const std::shared_ptr<Shared> shared = std::exchange(shared_, nullptr);
  shared->add(std::move(transfer), std::move(label));
}

Result<std::shared_ptr<CompletionQueue>> CompletionQueue::create(std::size_t depth) {
  if (depth == 0) {
    return Status(Code::kInvalidArgument, "a completion queue holds at least one transfer");
  }
  return std::shared_ptr<CompletionQueue>(
      new CompletionQueue(std::make_shared<Place::Shared>(depth)));
}

CompletionQueue::CompletionQueue(std::shared_ptr<Place::Shared> shared)
    : shared_(std::move(shared)) {}
CompletionQueue::~CompletionQueue() {
  if (shared_->is_foreign()) {
    // Its lock may be held by a thread that is not there.
    new std::shared_ptr<Place::Shared>(std::move(shared_));
    return;
  }
  shared_->close();
}

Result<CompletionQueue::Place> CompletionQueue::reserve() { return shared_->reserve(); }
void CompletionQueue::wait_for_room(std::int64_t deadline_ns) { shared_->wait_for_room(deadline_ns); }
Result<std::vector<CompletionQueue::Entry>> CompletionQueue::poll(std::size_t most) {
  return shared_->take(most);
}
Result<std::vector<CompletionQueue::Entry>> CompletionQueue::wait(std::size_t most,
                                                                  std::int64_t deadline_ns) {
  return shared_->wait(most, deadline_ns);
}
Result<int> CompletionQueue::fd() { return shared_->fd(); }
std::size_t CompletionQueue::depth() const { return shared_->depth(); }
std::size_t CompletionQueue::running() const { return shared_->running(); }
std::size_t CompletionQueue::ended() const { return shared_->ended(); }
bool CompletionQueue::is_closed() const { return shared_->is_closed(); }
void CompletionQueue::close() { shared_->close(); }

}  // namespace kvzc
