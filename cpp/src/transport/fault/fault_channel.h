// FaultChannel: a channel that cuts, delays, shuffles and fails what it hands to another one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/mutex.h"
#include "kvzc/faults.h"
#include "kvzc/transport.h"
#include "transport/fault/timer.h"
#include "transport/fault/trouble.h"

namespace kvzc::fault {

class FaultChannel;
struct Stripe;

// What the channels of one transport share.
struct Workshop {
  Workshop(TransportHost& outer, const FaultOptions& wanted)
      : host(outer), options(wanted), dice(wanted) {}

  TransportHost& host;  // The engine's.
  const FaultOptions options;
  Dice dice;
  Timer timer;  // Runs only if the options have a use for it.
  Mutex mutex;
  std::unordered_set<FaultChannel*> channels KVZC_GUARDED_BY(mutex);
};

// Drops a reference to a stripe, and with the last one the stripe's to the whole.
void release_stripe(Workshop& shop, Stripe& stripe);

// One posted operation on its way. It holds a reference to the operation until the end is told.
struct Voyage {
  enum class Stage {
    kMoving,  // Until its last stripe is over, and then for as long as its end is kept back.
    kEnding,  // The timer will end it.
    kEnded    // Taken off the channel's table by the thread that tells the end.
  };

  Voyage(FaultChannel& on, Operation& whole, Trouble drawn, std::int64_t now)
      : channel(on), operation(whole), trouble(std::move(drawn)), posted_ns(now) {}
  bool is_through() const { return next == trouble.cuts.size() && stripes.empty(); }

  FaultChannel& channel;
  Operation& operation;
  const Trouble trouble;
  const std::int64_t posted_ns;
  // Guarded by the channel's mutex.
  std::size_t next = 0;          // The first cut that has not begun.
  std::vector<Stripe*> stripes;  // Those that have begun and are not over.
  Stage stage = Stage::kMoving;
};

// A part of an operation, as an operation of its own. As long as it lives it holds a reference to
// the whole, and by that to what keeps the channel alive.
struct Stripe final : Operation {
  explicit Stripe(std::shared_ptr<Voyage> of) : voyage(std::move(of)) {}

  const std::shared_ptr<Voyage> voyage;
  // Guarded by the channel's mutex.
  std::size_t place = 0;   // In the voyage's list.
  bool is_over = false;
  bool is_posted = false;  // The inner channel's post() has returned.
};

class FaultChannel final : public Channel {
 public:
  FaultChannel(Workshop& shop, std::uint64_t peer_token);
  ~FaultChannel() override;
  // Called once, before anything else.
  void set_inner(std::unique_ptr<Channel> inner) { inner_ = std::move(inner); }

  void post(Operation& operation) override;
  void help(Operation& operation, std::int64_t deadline_ns) override;
  void abort(Operation& operation) override;
  Status take_credit(std::size_t tag_bytes) override { return inner_->take_credit(tag_bytes); }
  void return_credit(std::size_t tag_bytes) override { inner_->return_credit(tag_bytes); }
  void wait_for_credit(std::size_t tag_bytes, std::int64_t timeout_ns) override {
    inner_->wait_for_credit(tag_bytes, timeout_ns);
  }
  void send_tag(const Tag& tag, Code code) override;
  Status look_at_grant(FenceTicket grant) override { return inner_->look_at_grant(grant); }
  void drain() override;
  void look() override { inner_->look(); }
  void begin_rest() override { inner_->begin_rest(); }
  void end_rest() override { inner_->end_rest(); }
  void grant_credits(std::uint32_t count) override { inner_->grant_credits(count); }
  Status fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns) override {
    return inner_->fence(grants, deadline_ns);
  }
  Status cut_off(std::int64_t deadline_ns) override { return inner_->cut_off(deadline_ns); }
  void lose(Status why, PeerFate fate) override;
  Status lost() const override { return inner_->lost(); }
  // What is held back moves no bytes, and after lose() it never will.
  bool is_quiet() const override { return inner_->is_quiet(); }
  std::string explain(const RemoteMemory& memory) const override {
    return inner_->explain(memory) + " (with trouble made on purpose)";
  }

  // --- What the inner channel reports. Thread: any. ---

  void stripe_ended(Stripe& stripe, const Status& status);
  void arrived(std::string_view tag, Code code);
  void inner_lost() { shop_.host.peers.channel_lost(peer_token_); }

  // --- Ending everything, in two steps. Thread: any. ---

  using VoyagePtr = std::shared_ptr<Voyage>;
  // A voyage that must end, and its stripes that the inner channel has, all with a reference.
  struct Stranded {
    VoyagePtr voyage;
    std::vector<Stripe*> posted;
  };
  // Fails all that runs. Calls nobody.
  void strand_all(const Status& why, std::vector<Stranded>* out);
  // Ends them; those of which stripes still move, as soon as these are over. Their references keep
  // the channels alive until all is done.
  static void end_all(Workshop& shop, const std::vector<Stranded>& stranded);

 private:

  enum class Turn { kPost, kTimer };
  // Begins what is due, then looks whether all is over. Requires of this and the next: the caller
  // holds a reference to the operation.
  void advance(const VoyagePtr& voyage, Turn turn);
  // Ends it if it is through and nothing holds its end back.
  void settle(const VoyagePtr& voyage);
  void tell_end(Operation& operation);
  void on_time(const VoyagePtr& voyage);

  Stripe& begin_stripe(const VoyagePtr& voyage) KVZC_REQUIRES(mutex_);
  // Lets nothing more of it begin; gives its stripes that the inner channel has, with a reference.
  std::vector<Stripe*> pass_over(Voyage& voyage, const Status& why) KVZC_REQUIRES(mutex_);

  // Drops the references too.
  void abort_stripes(const std::vector<Stripe*>& stripes);
  void send_held_tag(std::uint64_t number);
  void fall_silent();
  void detect();

  struct HeldTag {
    Tag tag;
    Code code;
  };

  Workshop& shop_;
  const std::uint64_t peer_token_;
  std::unique_ptr<Channel> inner_;  // Constant once set.
  std::atomic<bool> is_silent_{false};
  std::atomic<std::uint64_t> posts_{0};
  std::atomic<std::uint64_t> ends_{0};

  // Held alone, or with the timer's inside; nobody is called with it. Guards the rest.
  Mutex mutex_;
  std::condition_variable_any is_empty_;
  std::unordered_map<const Operation*, VoyagePtr> voyages_ KVZC_GUARDED_BY(mutex_);
  std::map<std::uint64_t, HeldTag> held_tags_ KVZC_GUARDED_BY(mutex_);  // By when they were sent.
  std::uint64_t next_tag_ KVZC_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvzc::fault
