#include "transport/fault/fault_channel.h"

#include <algorithm>
#include <string>

#include "base/clock.h"

namespace kvzc::fault {
namespace {

Status injected(const char* what) {
  return Status(Code::kSystem, std::string("injected: ") + what);
}

// Gives a stripe its share of the runs.
void fill(Stripe& stripe, const Operation& whole, const Cut& cut) {
  stripe.direction = whole.direction;
  stripe.fence = whole.fence;
  stripe.after = whole.after;
  stripe.nbytes = cut.nbytes;
  std::uint64_t left = cut.nbytes;
  std::uint64_t skip = cut.skip_bytes;
  std::uint32_t run = cut.run;
  for (std::uint32_t at = cut.segment; left > 0; ++at) {
    const Segment& from = whole.segments[at];
    if (at != cut.segment) run = from.first_run;
    const auto first = static_cast<std::uint32_t>(stripe.runs.size());
    for (; left > 0 && run < from.first_run + from.run_count; ++run) {
      const Run& source = whole.runs[run];
      const std::uint64_t take = std::min(source.nbytes - skip, left);
      if (take > 0) stripe.runs.push_back({source.local + skip, source.remote + skip, take});
      left -= take;
      skip = 0;
    }
    const auto count = static_cast<std::uint32_t>(stripe.runs.size()) - first;
    if (count > 0) stripe.segments.push_back({first, count, from.remote, from.local});
  }
}

}  // namespace

void release_stripe(Workshop& shop, Stripe& stripe) {
  if (!stripe.release()) return;
  Operation& whole = stripe.voyage->operation;
  delete &stripe;
  shop.host.operations.release(whole);
}

FaultChannel::FaultChannel(Workshop& shop, std::uint64_t peer_token)
    : shop_(shop), peer_token_(peer_token) {
  const MutexLock lock(shop_.mutex);
  shop_.channels.insert(this);
}

// An engine keeps a channel for as long as anything on it runs, so that nothing is left to end here.
FaultChannel::~FaultChannel() {
  {
    const MutexLock lock(shop_.mutex);
    shop_.channels.erase(this);
  }
  std::vector<Stranded> stranded;
  strand_all(Status(Code::kClosed, "the channel is closed"), &stranded);
  end_all(shop_, stranded);
  {
    UniqueLock lock(mutex_);
    is_empty_.wait(lock, [this]() KVZC_REQUIRES(mutex_) { return voyages_.empty(); });
  }
  // Last: without a voyage nothing asks the timer for anything.
  shop_.timer.forget(this);
}

// --- The way of an operation ---

void FaultChannel::post(Operation& operation) {
  OperationSink& operations = shop_.host.operations;
  // One reference for the voyage, one for this look at it: it may end on another thread meanwhile.
  operations.retain(operation);
  operations.retain(operation);
  Trouble trouble = shop_.dice.trouble_for(operation);
  const auto voyage = std::make_shared<Voyage>(*this, operation, std::move(trouble), now_ns());
  if (voyage->trouble.fails_at_once) operation.fail(injected("the post failed"));
  {
    const MutexLock lock(mutex_);
    voyages_.emplace(&operation, voyage);
  }
  const std::uint64_t most = shop_.options.vanish_after_posts;
  if (most != 0 && posts_.fetch_add(1) >= most) fall_silent();
  // From here on it may be aborted. Whoever failed it before that is seen by the next look.
  operation.channel.store(this, std::memory_order_seq_cst);
  advance(voyage, Turn::kPost);
  operations.release(operation);
}

void FaultChannel::advance(const VoyagePtr& voyage, Turn turn) {
  // Whoever posts begins no stripe that is delayed, and the timer one at a time: many transfers
  // that travel together are mixed, and a post does not last as long as all its copies.
  bool is_time = turn == Turn::kTimer || shop_.options.most_delay_seconds == 0;
  if (Status why = inner_->lost(); !why.is_ok()) voyage->operation.fail(std::move(why));
  UniqueLock lock(mutex_);
  while (voyage->next < voyage->trouble.cuts.size()) {
    if (voyage->operation.has_failed()) {
      voyage->next = voyage->trouble.cuts.size();
      break;
    }
    if (is_silent_.load(std::memory_order_acquire)) return;
    const std::int64_t due_ns = voyage->posted_ns + voyage->trouble.cuts[voyage->next].delay_ns;
    if (!is_time && shop_.timer.run_at(due_ns, this, [this, voyage] { on_time(voyage); })) return;
    is_time = shop_.options.most_delay_seconds == 0;
    Stripe& stripe = begin_stripe(voyage);
    lock.unlock();
    inner_->post(stripe);
    lock.lock();
    stripe.is_posted = true;
    const bool must_abort = !stripe.is_over && stripe.has_failed();
    lock.unlock();
    // It was failed while it was being posted, when nobody else could abort it yet.
    if (must_abort) inner_->abort(stripe);
    release_stripe(shop_, stripe);
    lock.lock();
  }
  lock.unlock();
  settle(voyage);
}

Stripe& FaultChannel::begin_stripe(const VoyagePtr& voyage) {
  auto* const stripe = new Stripe(voyage);
  fill(*stripe, voyage->operation, voyage->trouble.cuts[voyage->next++]);
  stripe->place = voyage->stripes.size();
  voyage->stripes.push_back(stripe);
  voyage->operation.retain();
  stripe->retain();  // One for the inner channel, until it retires it, one for the caller.
  stripe->retain();
  return *stripe;
}

void FaultChannel::stripe_ended(Stripe& stripe, const Status& status) {
  Voyage& voyage = *stripe.voyage;
  {
    const MutexLock lock(mutex_);
    stripe.is_over = true;
    voyage.stripes[stripe.place] = voyage.stripes.back();
    voyage.stripes[stripe.place]->place = stripe.place;
    voyage.stripes.pop_back();
    if (!status.is_ok()) {
      voyage.operation.fail(status);
      voyage.next = voyage.trouble.cuts.size();
      for (Stripe* other : voyage.stripes) other->fail(status);
    }
  }
  settle(stripe.voyage);
}

void FaultChannel::settle(const VoyagePtr& voyage) {
  Operation& operation = voyage->operation;
  {
    const MutexLock lock(mutex_);
    if (voyage->stage == Voyage::Stage::kEnded || !voyage->is_through()) return;
    // What has failed ends at once, whatever was drawn for it: a cancel waits for this.
    if (!operation.has_failed()) {
      if (is_silent_.load(std::memory_order_acquire)) return;
      const Trouble& trouble = voyage->trouble;
      if (trouble.fails_midway) {
        operation.fail(injected("the transfer failed after some of its bytes had moved"));
      } else if (trouble.loses_completion) {
        return;
      } else if (voyage->stage == Voyage::Stage::kMoving && trouble.end_delay_ns > 0 &&
                 shop_.timer.run_at(now_ns() + trouble.end_delay_ns, this,
                                    [this, voyage] { on_time(voyage); })) {
        voyage->stage = Voyage::Stage::kEnding;
        return;
      }
    }
    voyage->stage = Voyage::Stage::kEnded;
    voyages_.erase(&operation);
    if (voyages_.empty()) is_empty_.notify_all();
  }
  tell_end(operation);
}

void FaultChannel::tell_end(Operation& operation) {
  Status why = operation.failure();
  if (operation.has_tag && !is_silent_.load(std::memory_order_acquire)) {
    inner_->send_tag(operation.tag, why.code());
  }
  const std::uint64_t most = shop_.options.vanish_after_posts;
  if (most != 0 && ends_.fetch_add(1) + 1 >= most) fall_silent();
  OperationSink& operations = shop_.host.operations;
  operations.retire(operation, std::move(why));
  operations.release(operation);  // The last one may take this channel along.
}

void FaultChannel::on_time(const VoyagePtr& voyage) {
  Operation& operation = voyage->operation;
  {
    const MutexLock lock(mutex_);
    if (voyage->stage == Voyage::Stage::kEnded) return;
    operation.retain();
  }
  OperationSink& operations = shop_.host.operations;
  advance(voyage, Turn::kTimer);
  operations.release(operation);
}

// --- Helping and ending it early ---

void FaultChannel::help(Operation& operation, std::int64_t deadline_ns) {
  std::vector<Stripe*> stripes;
  {
    const MutexLock lock(mutex_);
    const auto found = voyages_.find(&operation);
    if (found == voyages_.end()) return;
    for (Stripe* stripe : found->second->stripes) {
      if (!stripe->is_posted) continue;
      stripe->retain();
      stripes.push_back(stripe);
    }
  }
  // What is held back stays held back, however many wait for it.
  for (Stripe* stripe : stripes) {
    if (deadline_ns == INT64_MAX || now_ns() < deadline_ns) inner_->help(*stripe, deadline_ns);
    release_stripe(shop_, *stripe);
  }
}

void FaultChannel::abort(Operation& operation) {
  VoyagePtr voyage;
  std::vector<Stripe*> posted;
  {
    const MutexLock lock(mutex_);
    const auto found = voyages_.find(&operation);
    if (found == voyages_.end()) return;
    voyage = found->second;
    posted = pass_over(*voyage, operation.failure());
  }
  abort_stripes(posted);
  settle(voyage);
}

std::vector<Stripe*> FaultChannel::pass_over(Voyage& voyage, const Status& why) {
  std::vector<Stripe*> posted;
  voyage.next = voyage.trouble.cuts.size();
  for (Stripe* stripe : voyage.stripes) {
    stripe->fail(why);
    if (!stripe->is_posted) continue;  // Whoever posts it sees that it has failed.
    stripe->retain();
    posted.push_back(stripe);
  }
  return posted;
}

void FaultChannel::abort_stripes(const std::vector<Stripe*>& stripes) {
  for (Stripe* stripe : stripes) {
    inner_->abort(*stripe);
    release_stripe(shop_, *stripe);
  }
}

void FaultChannel::strand_all(const Status& why, std::vector<Stranded>* out) {
  const MutexLock lock(mutex_);
  for (const auto& [operation, voyage] : voyages_) {
    voyage->operation.retain();
    voyage->operation.fail(why);
    out->push_back({voyage, pass_over(*voyage, voyage->operation.failure())});
  }
}

void FaultChannel::end_all(Workshop& shop, const std::vector<Stranded>& stranded) {
  for (const Stranded& each : stranded) {
    each.voyage->channel.abort_stripes(each.posted);
    each.voyage->channel.settle(each.voyage);
  }
  for (const Stranded& each : stranded) shop.host.operations.release(each.voyage->operation);
}

void FaultChannel::lose(Status why, PeerFate fate) {
  // Tags that were sent before the end still count.
  std::map<std::uint64_t, HeldTag> tags;
  {
    const MutexLock lock(mutex_);
    tags.swap(held_tags_);
  }
  for (const auto& [number, held] : tags) {
    if (!is_silent_.load(std::memory_order_acquire)) inner_->send_tag(held.tag, held.code);
  }
  inner_->lose(std::move(why), fate);
  // The inner channel first: what is posted from now on finds it lost, what was is in the table.
  std::vector<Stranded> stranded;
  strand_all(inner_->lost(), &stranded);
  end_all(shop_, stranded);
}

// --- Tags ---

void FaultChannel::send_tag(const Tag& tag, Code code) {
  if (is_silent_.load(std::memory_order_acquire)) return;
  if (const std::int64_t delay_ns = shop_.dice.delay_ns(); delay_ns > 0) {
    const MutexLock lock(mutex_);
    const std::uint64_t number = next_tag_++;
    if (shop_.timer.run_at(now_ns() + delay_ns, this, [this, number] { send_held_tag(number); })) {
      held_tags_.insert({number, {tag, code}});
      return;
    }
  }
  inner_->send_tag(tag, code);
}

void FaultChannel::send_held_tag(std::uint64_t number) {
  UniqueLock lock(mutex_);
  const auto held = held_tags_.extract(number);
  lock.unlock();
  if (held.empty() || is_silent_.load(std::memory_order_acquire)) return;
  inner_->send_tag(held.mapped().tag, held.mapped().code);
}

void FaultChannel::drain() {
  if (!is_silent_.load(std::memory_order_acquire)) inner_->drain();
}

void FaultChannel::arrived(std::string_view tag, Code code) {
  if (is_silent_.load(std::memory_order_acquire)) return;
  shop_.host.peers.arrived(peer_token_, tag, code);
}

// --- Silence ---

void FaultChannel::fall_silent() {
  if (is_silent_.exchange(true, std::memory_order_acq_rel)) return;
  const Deadline detection = Deadline::after_seconds(shop_.options.detection_seconds);
  if (!detection.is_never()) shop_.timer.run_at(detection.at(), this, [this] { detect(); });
}

void FaultChannel::detect() {
  if (!inner_->lost().is_ok()) return;
  inner_->lose(Status(Code::kPeerLost, "injected: the peer fell silent"), PeerFate::kUnknown);
  // Told first: the end of the last operation may take this channel along.
  shop_.host.peers.channel_lost(peer_token_);
  std::vector<Stranded> stranded;
  strand_all(inner_->lost(), &stranded);
  end_all(shop_, stranded);
}

}  // namespace kvzc::fault
