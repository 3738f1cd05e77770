#include "transport/rdma/rdma_channel.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/doorbell.h"
#include "base/futex.h"

namespace kvzc::rdma {
namespace {

// A waiter looks at the queues itself for at least, and at most, so long.
constexpr std::int64_t kHelpNs = 50'000;
constexpr std::int64_t kMostHelpNs = 2'000'000;
// A rail on another NUMA node than the memory counts as if so much more were under way on it.
constexpr std::uint64_t kFarBytes = 2u << 20;
// Other operations get their turn after so many bytes of one.
constexpr std::uint64_t kTurnBytes = 1u << 20;
// Who posts looks at the queues once in so many posts.
constexpr std::uint64_t kPostsPerLook = 16;
// What a peer that keeps its promises stays far below: messages that overtake one on a rail that has
// failed, questions of which it does not take the answers, slots of grants (EngineOptions::max_grants).
constexpr std::uint64_t kMostAhead = 1u << 20;
constexpr std::size_t kMostUnanswered = 1u << 17;
constexpr std::uint32_t kMostSlots = 1u << 24;
// What a thread gives to one that waits for the channel, before it takes its turn all the same.
constexpr int kMostYields = 100;

// How often watch() finds nothing before a rail is taken out. A device that works says earlier that its
// retries are exhausted: after 4.096 us x 2^ack_timeout for each, up to four times as long in hardware.
std::uint32_t most_still(const RdmaOptions& options) {
  const double retries_ns = 4096.0 * std::pow(2.0, options.ack_timeout) * (options.retries + 1);
  const double looks = 1 + 4 * retries_ns / static_cast<double>(RdmaChannel::kWatchNs);
  return static_cast<std::uint32_t>(std::clamp(looks, 5.0, 1e6));
}

Status revoked() {
  return Status(Code::kRevoked,
                "the owner has revoked this grant, or closed its region; ask it for a new handle");
}

std::uint64_t to_bound(std::uint64_t offset, std::uint64_t part_bytes) {
  return part_bytes - offset % part_bytes;
}

// What the status of a failed work request means to people.
std::string words(const ibv::Verbs& verbs, ibv_wc_status status) {
  const std::string name = verbs.wc_status_str(status);
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return name + ": the peer's port does not answer; it or the way to it is down, or its queue "
                    "pair is gone";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return name + ": the peer has no receive posted";
    case IBV_WC_REM_ACCESS_ERR:
      return name + ": the peer's device refused the key or the range";
    default:
      return name;
  }
}

}  // namespace

RdmaChannel::RdmaChannel(TransportHost& host, Poller& poller,
                         std::vector<std::unique_ptr<QueuePair>> pairs,
                         std::uint32_t arrival_depth, const ChannelPeer& peer)
    : host_(host),
      poller_(poller),
      peer_depth_(arrival_depth),
      peer_(peer),
      rail_count_(pairs.size()),
      most_still_(most_still(host.rdma)),
      patience_(kHelpNs, kMostHelpNs) {
  for (const auto& pair : pairs) most_sges_ = std::min<std::size_t>(most_sges_, pair->most_sges());
  shared_.is_closed_there.resize(pairs.size());
  shared_.why_out.resize(pairs.size());
  shared_.has_said_close.resize(pairs.size());
  shared_.has_said_closed.resize(pairs.size());
  shared_.orphans.resize(pairs.size());
  const MutexLock lock(shared_.mutex);
  shared_.pairs = std::move(pairs);
}

Status RdmaChannel::connect(std::span<const QueuePairAddress> peer, bool is_same_host) {
  poller_.add(this);
  std::vector<QueuePair*> pairs;
  {
    const MutexLock lock(shared_.mutex);
    for (const auto& pair : shared_.pairs) pairs.push_back(pair.get());
  }
  // First, so that no message of a quick peer goes astray; and not under the lock: a rail's comes before it.
  for (QueuePair* const pair : pairs) pair->hand_over(this);
  const MutexLock lock(shared_.mutex);
  Status outcome;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    Status connected = pairs[i]->connect(peer[i], is_same_host);
    shared_.why_out[i] = connected.text();
    if (outcome.is_ok()) outcome = std::move(connected);
  }
  return has_live_rail() ? Status::ok() : outcome;
}

RdmaChannel::~RdmaChannel() {
  poller_.remove(this);
  // All of them before the first goes: completions of one rail look at every pair.
  for (const auto& pair : shared_.pairs) pair->leave();
  shared_.pairs.clear();
}

// --- Posting ---

Status RdmaChannel::find_keys(const Operation& operation, std::vector<Registration*>& out,
                              bool* is_parted) const {
  out.clear();
  for (const Segment& segment : operation.segments) {
    const auto& memory = static_cast<const RdmaMemory&>(*segment.remote);
    if (memory.rail_count() < rail_count_) {
      return Status(Code::kProtocol, "the peer named its memory for fewer rails than it has");
    }
    for (std::size_t r = 0; r < rail_count_; ++r) {
      // Kept with the memory, which the operation keeps.
      const std::shared_ptr<Device>& device = poller_.rails()[r]->shared_device();
      Registration* known = segment.local.registrations->find<Registration>(device.get(), Access::kBoth);
      if (known == nullptr) {
        Result<std::shared_ptr<Registration>> keys =
            Registration::of(device, segment.local, Access::kBoth);
        if (!keys.is_ok()) return keys.status();
        known = keys->get();
      }
      *is_parted |= !known->is_whole() || !memory.rail(r).is_whole();
      out.push_back(known);
    }
  }
  return Status::ok();
}

void RdmaChannel::post(Operation& operation) {
  if (!begin(operation)) return;
  (void)poller_.help();
}

// A mutex is not fair: who posts and posts would take it again and again before the thread that it has
// woken gets there, and wake that one each time.
RdmaChannel::LockAhead::LockAhead(Shared& shared) : mutex_(shared.mutex) {
  if (mutex_.try_lock()) return;
  shared.ahead.fetch_add(1, std::memory_order_relaxed);
  mutex_.lock();
  shared.ahead.fetch_sub(1, std::memory_order_relaxed);
}

void RdmaChannel::stand_back() {
  for (int i = 0; i < kMostYields; ++i) {
    if (shared_.ahead.load(std::memory_order_relaxed) == 0) return;
    std::this_thread::yield();
  }
}

// Gives whether it is time to look what has come back: a thread that posts and posts would otherwise
// keep the poller from the lock.
bool RdmaChannel::begin(Operation& operation) {
  thread_local std::vector<Registration*> keys;
  bool is_parted = false;
  Status status = find_keys(operation, keys, &is_parted);
  poller_.mark_active();
  stand_back();
  Endings endings(host_.operations);
  const MutexLock lock(shared_.mutex);
  if (shared_.free_progresses.empty()) {
    shared_.progresses.push_back(std::make_unique<Progress>());
    shared_.free_progresses.push_back(shared_.progresses.back().get());
  }
  // What is queued already comes first.
  const bool is_alone = !shared_.is_lost && shared_.to_post.empty() && shared_.again.empty();
  Progress& progress = *shared_.free_progresses.back();
  shared_.free_progresses.pop_back();
  progress.begin(operation, keys);
  progress.is_parted = is_parted;
  if (rail_count_ == 1 && operation.nbytes < host_.rdma.least_striped_bytes) progress.rail = 0;
  operation.progress = &progress;
  // Sequentially consistent: who failed it and saw no channel is seen by the look below.
  operation.channel.store(this, std::memory_order_seq_cst);
  progress.running_at = static_cast<std::uint32_t>(shared_.running.size());
  shared_.running.push_back(&progress);
  if (shared_.is_lost) {
    operation.fail(shared_.lost_why);
  } else if (!status.is_ok()) {
    operation.fail(std::move(status));
  } else if (operation.nbytes > 0 && is_revoked(operation.fence)) {
    operation.fail(revoked());
  }
  bool is_posted = false;
  if (operation.nbytes == 0 || operation.has_failed()) {
    progress.is_all_posted = true;
    finish_if_over(progress, endings);
  } else {
    is_posted = is_alone && post_whole(progress);
    if (!is_posted) shared_.to_post.push_back(&progress);
  }
  if (is_alone && !is_posted) pump_data(endings);
  if (!is_alone || !ring() || !shared_.outgoing.empty()) pump(endings);
  return ++shared_.posts % kPostsPerLook == 0;
}

void RdmaChannel::pump(Endings& endings) {
  pump_messages();
  if (!shared_.to_flush.empty()) {
    for (Progress* progress : std::exchange(shared_.to_flush, {})) {
      finish_if_over(*progress, endings);
    }
  }
  if (!shared_.is_lost) pump_data(endings);
  pump_messages();
  (void)ring();
  look_at_broken_rails(endings);
  // Last, for all of the above may end what an owner asks about, and leave tags to be sent.
  answer_fences();
  if (shared_.outgoing.empty()) return;
  pump_messages();
  (void)ring();
}

// A pair that takes nothing more is broken then: its receives come back, and with them the channel
// looks at it. Gives whether all took what there was.
bool RdmaChannel::ring() {
  bool have_all_taken = true;
  for (const auto& pair : shared_.pairs) have_all_taken &= pair->post();
  return have_all_taken;
}

// Gives a rail that has room for more of it, or null.
QueuePair* RdmaChannel::rail_for(Progress& progress) {
  const auto has_room = [this](const QueuePair& pair) {
    return pair.has_room_for_data() &&
           pair.outstanding_bytes() < host_.rdma.most_outstanding_bytes;
  };
  if (progress.rail >= 0) {
    QueuePair& own = *shared_.pairs[static_cast<std::size_t>(progress.rail)];
    if (own.is_alive()) return has_room(own) ? &own : nullptr;
    progress.rail = -1;
  }
  QueuePair* best = nullptr;
  std::uint64_t least = 0;
  // Of one that is posted as a whole, pieces may come back: its last memory will do.
  const std::size_t segment =
      std::min<std::size_t>(progress.segment, progress.operation->segments.size() - 1);
  for (const auto& pair : shared_.pairs) {
    if (!has_room(*pair)) continue;
    const std::size_t at = segment * rail_count_ + pair->rail().index();
    const std::uint64_t load =
        pair->outstanding_bytes() + (progress.local[at]->is_near() ? 0 : kFarBytes);
    if (best == nullptr || load < least) best = pair.get(), least = load;
  }
  if (best != nullptr && progress.operation->nbytes < host_.rdma.least_striped_bytes) {
    progress.rail = static_cast<int>(best->rail().index());
  }
  return best;
}

// Gives the next piece: one contiguous remote range, of as many local runs as one request takes.
Piece RdmaChannel::cut_piece(const Progress& progress) const {
  const Operation& operation = *progress.operation;
  const Segment& segment = operation.segments[progress.segment];
  Piece piece{const_cast<Progress*>(&progress), progress.segment, progress.run, progress.skip, 0};
  std::uint64_t limit = host_.rdma.most_request_bytes;
  const auto& memory = static_cast<const RdmaMemory&>(*segment.remote);
  const std::uint64_t remote = operation.runs[progress.run].remote + progress.skip;
  for (std::size_t r = 0; r < rail_count_; ++r) {
    if (!memory.rail(r).is_whole()) limit = std::min(limit, to_bound(remote, memory.rail(r).part_bytes));
  }
  std::uint64_t skip = progress.skip;
  const std::uint32_t end = segment.first_run + segment.run_count;
  for (std::size_t sges = 0; progress.run + sges < end && sges < most_sges_; ++sges) {
    const Run& run = operation.runs[progress.run + sges];
    if (run.remote + skip != remote + piece.nbytes) break;
    std::uint64_t take = std::min(run.nbytes - skip, limit - piece.nbytes);
    const auto local = static_cast<std::uint64_t>(run.local - segment.local.data) + skip;
    bool is_cut = false;
    for (std::size_t r = 0; r < rail_count_; ++r) {
      const Registration& keys = *progress.local[progress.segment * rail_count_ + r];
      if (keys.is_whole()) continue;
      const std::uint64_t bound = to_bound(local, keys.part_bytes());
      if (bound < take) take = bound, is_cut = true;
    }
    piece.nbytes += take;
    if (is_cut || piece.nbytes == limit || take < run.nbytes - skip) break;
    skip = 0;
  }
  return piece;
}

void RdmaChannel::advance(Progress& progress, std::uint64_t nbytes) const {
  const Operation& operation = *progress.operation;
  while (nbytes > 0) {
    const Run& run = operation.runs[progress.run];
    const std::uint64_t take = std::min(nbytes, run.nbytes - progress.skip);
    nbytes -= take;
    progress.skip += take;
    if (progress.skip < run.nbytes) return;
    progress.skip = 0;
    ++progress.run;
    const Segment& segment = operation.segments[progress.segment];
    if (progress.run < segment.first_run + segment.run_count) continue;
    ++progress.segment;
    if (progress.segment == operation.segments.size()) {
      progress.is_all_posted = true;
      return;
    }
    progress.run = operation.segments[progress.segment].first_run;
  }
}

void RdmaChannel::add_piece(QueuePair& pair, const Piece& piece) {
  Progress& progress = *piece.progress;
  const Operation& operation = *progress.operation;
  const Segment& segment = operation.segments[piece.segment];
  const auto& memory = static_cast<const RdmaMemory&>(*segment.remote);
  const std::size_t rail = pair.rail().index();
  const Registration& keys = *progress.local[piece.segment * rail_count_ + rail];
  ibv_sge* const sges = pair.data_sges();
  std::size_t count = 0;
  std::uint64_t left = piece.nbytes;
  std::uint64_t skip = piece.skip;
  for (const Run* run = &operation.runs[piece.run]; left > 0; ++run) {
    const std::uint64_t take = std::min(left, run->nbytes - skip);
    std::byte* const local = run->local + skip;
    sges[count].addr = reinterpret_cast<std::uint64_t>(local);
    sges[count].length = static_cast<std::uint32_t>(take);
    sges[count].lkey = keys.local_key(static_cast<std::uint64_t>(local - segment.local.data));
    ++count;
    left -= take;
    skip = 0;
  }
  const std::uint64_t remote = operation.runs[piece.run].remote + piece.skip;
  const RdmaMemory::RailKeys& theirs = memory.rail(rail);
  pair.add_data(operation.direction, count, memory.address(remote), theirs.key(remote), piece);
  progress.rails_used |= std::uint64_t{1} << rail;
}

void RdmaChannel::pump_data(Endings& endings) {
  while (!shared_.again.empty()) {
    const Piece piece = shared_.again.front();
    Progress& progress = *piece.progress;
    if (progress.operation->has_failed()) {
      shared_.again.pop_front();
      --progress.outstanding;
      finish_if_over(progress, endings);
      continue;
    }
    QueuePair* const pair = rail_for(progress);
    if (pair == nullptr) return;
    shared_.again.pop_front();
    add_piece(*pair, piece);
  }
  while (!shared_.to_post.empty()) {
    Progress& progress = *shared_.to_post.front();
    if (progress.operation->has_failed()) {
      shared_.to_post.pop_front();
      progress.is_all_posted = true;
      finish_if_over(progress, endings);
      continue;
    }
    if (!take_turn(progress)) return;
    shared_.to_post.pop_front();
    if (!progress.is_all_posted) shared_.to_post.push_back(&progress);
  }
}

// As take_turn() would, but for most puts: there is nothing to cut, and nothing of it can follow.
bool RdmaChannel::post_whole(Progress& progress) {
  const Operation& operation = *progress.operation;
  if (operation.runs.size() != 1 || progress.is_parted ||
      operation.nbytes > host_.rdma.most_request_bytes) {
    return false;
  }
  QueuePair* const pair = rail_for(progress);
  if (pair == nullptr) return false;
  const std::size_t rail = pair->rail().index();
  const Run& run = operation.runs[0];
  const auto& memory = static_cast<const RdmaMemory&>(*operation.segments[0].remote);
  *pair->data_sges() = {reinterpret_cast<std::uint64_t>(run.local),
                        static_cast<std::uint32_t>(run.nbytes),
                        progress.local[rail]->parts()[0]->lkey};
  pair->add_data(operation.direction, 1, memory.address(run.remote), memory.rail(rail).keys[0],
                 {.progress = &progress, .nbytes = run.nbytes});
  progress.outstanding = 1;
  progress.rails_used = std::uint64_t{1} << rail;
  progress.is_all_posted = true;
  finish_posting(progress);
  return true;
}

bool RdmaChannel::take_turn(Progress& progress) {
  for (std::uint64_t turn_bytes = 0; turn_bytes < kTurnBytes;) {
    QueuePair* const pair = rail_for(progress);
    if (pair == nullptr) return false;
    const Piece piece = cut_piece(progress);
    add_piece(*pair, piece);
    ++progress.outstanding;
    turn_bytes += piece.nbytes;
    advance(progress, piece.nbytes);
    if (progress.is_all_posted) {
      finish_posting(progress);
      return true;
    }
  }
  return true;
}

// Behind the writes on the same queue pair a READ comes back when they are visible.
void RdmaChannel::add_flushes(Progress& progress) {
  while (progress.rails_used != 0) {
    QueuePair& pair = *shared_.pairs[static_cast<std::size_t>(std::countr_zero(progress.rails_used))];
    // What had been acknowledged on a rail that broke is visible: the peer's device gave its
    // receives back behind it.
    if (pair.must_flush() && pair.is_alive()) {
      if (!pair.has_room_for_data()) return;
      pair.add_flush({&progress, 0, 0, 0, 0});
      ++progress.outstanding;
    }
    progress.rails_used &= progress.rails_used - 1;
  }
}

// What follows the last byte is posted right behind it where that is sound.
void RdmaChannel::finish_posting(Progress& progress) {
  const Operation& operation = *progress.operation;
  if (operation.direction == Direction::kGet) {
    progress.rails_used = 0;
    return;
  }
  // A queue pair carries everything out in order: with all of it on one, the tag cannot come first.
  const bool is_on_one =
      progress.rail >= 0 && progress.rails_used == std::uint64_t{1} << progress.rail;
  if (operation.has_tag && is_on_one && shared_.outgoing.empty()) {
    QueuePair& pair = *shared_.pairs[static_cast<std::size_t>(progress.rail)];
    if (pair.has_room_for_message(MessageType::kTag)) {
      Message message;
      message.header.type = MessageType::kTag;
      message.header.body_bytes = operation.tag.nbytes;
      message.header.rail = static_cast<std::uint8_t>(progress.rail);
      message.header.sequence = shared_.next_sequence++;
      std::memcpy(message.body, operation.tag.bytes, operation.tag.nbytes);
      progress.tag_sequence = message.header.sequence;
      progress.is_tag_posted = true;
      ++progress.outstanding;
      send_message(pair, message, &progress);
    }
  }
  add_flushes(progress);
}

void RdmaChannel::give_up_rest(Progress& progress, Endings& endings) {
  if (!progress.is_all_posted) {
    std::erase(shared_.to_post, &progress);
    progress.is_all_posted = true;
  }
  progress.outstanding -= static_cast<std::uint32_t>(std::erase_if(
      shared_.again, [&](const Piece& piece) { return piece.progress == &progress; }));
  finish_if_over(progress, endings);
}

void RdmaChannel::finish_if_over(Progress& progress, Endings& endings) {
  if (!progress.is_all_posted || progress.outstanding > 0) return;
  Operation& operation = *progress.operation;
  if (operation.direction == Direction::kGet) progress.rails_used = 0;
  if (progress.rails_used != 0 && !shared_.is_lost) {
    // Also of one that failed: what had begun must be over at the target too.
    add_flushes(progress);
    if (progress.outstanding > 0) return;
    if (progress.rails_used != 0) {
      std::erase(shared_.to_flush, &progress);
      shared_.to_flush.push_back(&progress);
      return;
    }
  }
  // A tag that went out says that all went well; what was said afterwards came too late.
  Status status;
  if (!progress.is_tag_posted) {
    if (operation.has_failed()) status = operation.failure();
    if (operation.has_tag && !shared_.is_lost) {
      queue_message(MessageType::kTag, status.code(),
                    {operation.tag.bytes, operation.tag.nbytes}, 0, progress.tag_sequence);
    }
  }
  operation.progress = nullptr;
  if (progress.slept_since_ns != 0) {
    poller_.remove_sleeper();
    patience_.came_after(now_ns() - progress.slept_since_ns + kHelpNs);
  }
  if (!shared_.to_flush.empty()) std::erase(shared_.to_flush, &progress);
  Progress* const last = shared_.running.back();
  shared_.running[last->running_at = progress.running_at] = last;
  shared_.running.pop_back();
  shared_.free_progresses.push_back(&progress);
  endings.add(operation, std::move(status));
}

void RdmaChannel::help(Operation& operation, std::int64_t deadline_ns) {
  // A first look costs no look at the clock.
  (void)poller_.help();
  if (operation.state.has_ended()) return patience_.came_after(0);
  const std::int64_t start = now_ns();
  std::int64_t until = std::min(deadline_ns, start + patience_.ns());
  for (;;) {
    const bool has_come = poller_.help() > 0;
    const std::int64_t now = now_ns();
    const bool has_ended = operation.state.has_ended();
    // The device is at work: what comes next is near.
    if (has_come) until = std::min(deadline_ns, now + patience_.ns());
    if (!has_ended && now < until) continue;
    host_.operations.waited(now - start);
    return has_ended ? patience_.came_after(now - start) : patience_.was_in_vain();
  }
}

void RdmaChannel::will_sleep(Operation& operation) {
  const MutexLock lock(shared_.mutex);
  auto* const progress = static_cast<Progress*>(operation.progress);
  if (progress != nullptr) watch_for_sleeper(*progress);
}

void RdmaChannel::watch_for_sleeper(Progress& progress) {
  if (progress.slept_since_ns != 0) return;
  progress.slept_since_ns = now_ns();
  poller_.add_sleeper();
}

void RdmaChannel::abort(Operation& operation) {
  Endings endings(host_.operations);
  const LockAhead lock(shared_);
  auto* const progress = static_cast<Progress*>(operation.progress);
  if (progress == nullptr) return;
  // Whoever cancels sleeps until it is over.
  watch_for_sleeper(*progress);
  give_up_rest(*progress, endings);
  pump(endings);
}

// --- Completions ---

void RdmaChannel::on_completions(std::size_t rail, std::span<const ibv_wc> completions,
                                 Endings& endings) {
  bool must_tell_loss = false;
  std::vector<Message> arrivals;
  {
    const LockAhead lock(shared_);
    QueuePair& pair = *shared_.pairs[rail];
    for (const ibv_wc& each : completions) take_completion(pair, each, endings);
    if (must_pump()) pump(endings);
    must_tell_loss = std::exchange(shared_.must_tell_loss, false);
    if (!shared_.arrivals.empty() && shared_.is_open) arrivals.swap(shared_.arrivals);
  }
  if (!arrivals.empty()) hand_on(arrivals);
  if (must_tell_loss) tell_loss();
}

void RdmaChannel::take_completion(QueuePair& pair, const ibv_wc& completion, Endings& endings) {
  const bool is_ok = completion.status == IBV_WC_SUCCESS;
  if (!is_ok && !pair.is_broken()) {
    break_rail(pair, words(pair.rail().device().verbs(), completion.status));
  }
  const auto number = static_cast<std::uint32_t>(completion.wr_id);
  if ((completion.wr_id & QueuePair::kReceiveBit) == 0) {
    // Those before a failed one may have gone well without a word: doing them again does no harm.
    pair.complete(number, [&](const Posted& entry) KVZC_REQUIRES(shared_.mutex) {
      came_back(pair, entry, is_ok, endings);
    });
    return;
  }
  if (!is_ok) {
    pair.count_flushed_receive();
    return;
  }
  poller_.mark_message();
  const Message& message = pair.received(number);
  if (completion.byte_len < sizeof(MessageHeader) || completion.byte_len != message.nbytes() ||
      message.header.body_bytes > kMaxBodyBytes || message.header.rail >= shared_.pairs.size()) {
    lose_locked(Status(Code::kProtocol, "the peer sent a message that makes no sense"), endings);
  } else {
    take_message(message, endings);
  }
  pair.repost(number);
}

void RdmaChannel::came_back(QueuePair& pair, const Posted& entry, bool is_ok, Endings& endings) {
  Progress* const progress = entry.piece.progress;
  if (entry.kind == Posted::Kind::kMessage) {
    pair.free_slot(entry);
    if (!is_ok) {
      if (progress != nullptr) {
        // Again, behind the data, under its old number; or, when the peer is lost, never.
        progress->is_tag_posted = false;
      } else if (!shared_.is_lost) {
        shared_.outgoing.push_front(pair.sent(entry));
      }
    }
    if (progress == nullptr) return;
  } else if (!is_ok && !shared_.is_lost) {
    shared_.orphans[pair.rail().index()].push_back(entry.piece);
    return;
  }
  --progress->outstanding;
  finish_if_over(*progress, endings);
}

bool RdmaChannel::must_pump() const {
  for (const auto& pair : shared_.pairs) {
    if (pair->must_pump()) return true;
  }
  return !shared_.to_post.empty() || !shared_.again.empty() || !shared_.outgoing.empty() ||
         !shared_.to_flush.empty() || !shared_.to_answer.empty() || must_tell_taken();
}

void RdmaChannel::hand_on(const std::vector<Message>& arrivals) {
  for (const Message& message : arrivals) {
    host_.peers.arrived(peer_.token,
                        {reinterpret_cast<const char*>(message.body), message.header.body_bytes},
                        code_from_wire(message.header.code));
  }
  if (!arrivals.empty()) host_.doorbell.ring();
}

// --- Messages ---

QueuePair* RdmaChannel::pair_for_message(MessageType type) {
  for (const auto& pair : shared_.pairs) {
    if (pair->has_room_for_message(type)) return pair.get();
  }
  return nullptr;
}

void RdmaChannel::queue_message(MessageType type, Code code, std::span<const std::byte> body,
                                std::size_t rail, std::uint64_t sequence) {
  Message& message = shared_.outgoing.emplace_back();
  message.header.type = type;
  message.header.code = static_cast<std::uint8_t>(code);
  message.header.body_bytes = static_cast<std::uint8_t>(body.size());
  message.header.rail = static_cast<std::uint8_t>(rail);
  message.header.sequence = sequence != 0 ? sequence : shared_.next_sequence++;
  std::copy(body.begin(), body.end(), message.body);
}

void RdmaChannel::send_message(QueuePair& pair, Message& message, Progress* progress) {
  QueuePair& about = *shared_.pairs[message.header.rail];
  message.header.consumed = about.consumed();
  message.header.taken_tags = shared_.taken_tags;
  about.told();
  if (shared_.told_taken != shared_.taken_tags) {
    shared_.told_taken = shared_.taken_tags;
    shared_.is_asked_for_credit = false;
  }
  pair.add_message(message, progress);
}

bool RdmaChannel::must_tell_taken() const {
  const std::uint64_t untold = shared_.taken_tags - shared_.told_taken;
  if (untold == 0) return false;
  return shared_.is_asked_for_credit || untold >= std::max(1u, host_.tuning.arrival_depth / 4);
}

void RdmaChannel::pump_messages() {
  if (shared_.is_lost) return;
  const auto tell = [this](std::size_t rail) KVZC_REQUIRES(shared_.mutex) {
    QueuePair* const pair = pair_for_message(MessageType::kCredit);
    if (pair == nullptr) return;
    Message message;
    message.header.type = MessageType::kCredit;
    message.header.rail = static_cast<std::uint8_t>(rail);
    message.header.sequence = shared_.next_sequence++;
    send_message(*pair, message, nullptr);
  };
  while (!shared_.outgoing.empty()) {
    Message& message = shared_.outgoing.front();
    QueuePair* const pair = pair_for_message(message.header.type);
    if (pair == nullptr) break;
    if (message.header.type == MessageType::kTag) {
      message.header.rail = static_cast<std::uint8_t>(pair->rail().index());
    }
    send_message(*pair, message, nullptr);
    shared_.outgoing.pop_front();
  }
  for (const auto& pair : shared_.pairs) {
    if (pair->is_alive() && pair->untold() >= QueuePair::kUntold) tell(pair->rail().index());
  }
  if (must_tell_taken()) tell(0);
}

void RdmaChannel::take_message(const Message& message, Endings& endings) {
  const MessageHeader& header = message.header;
  if (!shared_.pairs[header.rail]->peer_consumed(header.consumed) ||
      (header.sequence > shared_.seen_until &&
       header.sequence - shared_.seen_until > kMostAhead)) {
    lose_locked(Status(Code::kProtocol, "the peer counts messages that there never were"), endings);
    return;
  }
  if (header.taken_tags > shared_.peer_taken) {
    shared_.peer_taken = header.taken_tags;
    shared_.has_asked_for_credit = false;
    tell_change();
  }
  // After a rail broke some come twice.
  if (header.sequence == shared_.seen_until + 1) {
    ++shared_.seen_until;
  } else if (header.sequence <= shared_.seen_until ||
             !shared_.seen_more.insert(header.sequence).second) {
    return;
  }
  while (!shared_.seen_more.empty() && *shared_.seen_more.begin() == shared_.seen_until + 1) {
    shared_.seen_more.erase(shared_.seen_more.begin());
    ++shared_.seen_until;
  }
  QueuePair& about = *shared_.pairs[header.rail];
  switch (header.type) {
    case MessageType::kTag:
      if (++shared_.received_tags - shared_.taken_tags > host_.tuning.arrival_depth) {
        lose_locked(Status(Code::kProtocol, "the peer sent more tags than there was room for"),
                    endings);
        return;
      }
      shared_.arrivals.push_back(message);
      return;
    case MessageType::kCredit:
      return;
    case MessageType::kCreditAsk:
      shared_.is_asked_for_credit = true;
      return;
    case MessageType::kFenceAsk:
      take_fence_ask(message, endings);
      return;
    case MessageType::kFenceDone: {
      std::uint64_t number = 0;
      std::memcpy(&number, message.body, sizeof number);
      for (auto& [slot, asked] : shared_.asked) asked.is_done |= asked.number == number;
      tell_change();
      return;
    }
    case MessageType::kRailClosed:
      shared_.is_closed_there[header.rail] = true;
      about.break_off();
      return;
    case MessageType::kRailClose:
      about.break_off();
      return;
  }
  lose_locked(Status(Code::kProtocol, "the peer sent a message of an unknown kind"), endings);
}

// --- Tags ---

Status RdmaChannel::take_credit(std::size_t) {
  const auto has_room = [this]() KVZC_REQUIRES(shared_.mutex) {
    return shared_.reserved_tags - shared_.peer_taken < peer_depth_;
  };
  UniqueLock lock(shared_.mutex);
  if (!has_room()) {
    // What the peer has said of room may have come and not been looked at.
    lock.unlock();
    (void)poller_.look();
    lock.lock();
  }
  if (shared_.is_lost) return shared_.lost_why;
  if (has_room()) {
    ++shared_.reserved_tags;
    return Status::ok();
  }
  if (!std::exchange(shared_.has_asked_for_credit, true)) {
    queue_message(MessageType::kCreditAsk, Code::kOk, {}, 0);
    pump_messages();
    (void)ring();
  }
  return Status(Code::kWouldBlock,
                "the peer's inbox is full: it holds " + std::to_string(peer_depth_) +
                    " tags of ours that nobody there has waited for or polled");
}

void RdmaChannel::return_credit(std::size_t) {
  const MutexLock lock(shared_.mutex);
  --shared_.reserved_tags;
  tell_change();
}

void RdmaChannel::wait_for_credit(std::size_t, std::int64_t timeout_ns) {
  poller_.begin_rest();
  {
    UniqueLock lock(shared_.mutex);
    const bool has_come = shared_.is_lost || shared_.reserved_tags - shared_.peer_taken < peer_depth_;
    if (!has_come) sleep_for_change(lock, std::min(timeout_ns, std::int64_t{3'600'000'000'000}));
  }
  poller_.end_rest();
}

void RdmaChannel::send_tag(const Tag& tag, Code code) {
  const MutexLock lock(shared_.mutex);
  if (shared_.is_lost) return;
  queue_message(MessageType::kTag, code, {tag.bytes, tag.nbytes}, 0);
  pump_messages();
  (void)ring();
}

void RdmaChannel::drain() {
  if (!shared_.is_open.load(std::memory_order_acquire)) {
    std::vector<Message> arrivals;
    {
      const MutexLock lock(shared_.mutex);
      shared_.is_open = true;
      arrivals.swap(shared_.arrivals);
    }
    hand_on(arrivals);
  }
  if (host_.doorbell.is_event_armed()) poller_.see_to_messages();
  (void)poller_.look_surely();
}

// Called from within completions too: it ends no operation.
void RdmaChannel::grant_credits(std::uint32_t count) {
  const MutexLock lock(shared_.mutex);
  shared_.taken_tags += count;
  if (!must_tell_taken() || shared_.is_lost) return;
  pump_messages();
  (void)ring();
}

// --- Fence ---

bool RdmaChannel::is_revoked(FenceTicket grant) const {
  if (shared_.revoked.empty()) return false;
  const auto found = shared_.revoked.find(grant.slot);
  return found != shared_.revoked.end() && grant.epoch <= found->second;
}

Status RdmaChannel::look_at_grant(FenceTicket grant) {
  const MutexLock lock(shared_.mutex);
  if (shared_.is_lost) return shared_.lost_why;
  return is_revoked(grant) ? revoked() : Status::ok();
}

Status RdmaChannel::fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns) {
  {
    const MutexLock lock(shared_.mutex);
    Message body;
    std::size_t nbytes = 0;
    const auto send = [&]() KVZC_REQUIRES(shared_.mutex) {
      if (nbytes > 0) queue_message(MessageType::kFenceAsk, Code::kOk, {body.body, nbytes}, 0);
      nbytes = 0;
    };
    for (const FenceTicket& grant : grants) {
      AskedFence& asked = shared_.asked[grant.slot];
      if (asked.number != 0 && asked.epoch == grant.epoch) continue;  // By an earlier call.
      if (nbytes == 0) {
        const std::uint64_t number = shared_.next_fence++;
        std::memcpy(body.body, &number, sizeof number);
        nbytes = sizeof number;
      }
      asked = {grant.epoch, shared_.next_fence - 1, false};
      const FenceEntry entry{grant.slot, static_cast<std::uint32_t>(grant.epoch),
                             static_cast<std::uint32_t>(grant.epoch >> 32)};
      std::memcpy(body.body + nbytes, &entry, sizeof entry);
      nbytes += sizeof entry;
      if (nbytes + sizeof entry > kMaxBodyBytes) send();
    }
    send();
    pump_messages();
    (void)ring();
  }
  const std::int64_t spin_until = now_ns() + kHelpNs;
  for (;;) {
    (void)poller_.help();
    UniqueLock lock(shared_.mutex);
    // Through broken queue pairs nothing comes in, whatever the peer does.
    bool is_done = shared_.is_lost && are_all_drained();
    if (!is_done && !shared_.is_lost) {
      is_done = std::all_of(
          grants.begin(), grants.end(), [this](const FenceTicket& grant) KVZC_REQUIRES(shared_.mutex) {
            return shared_.asked[grant.slot].is_done;
          });
    }
    if (is_done) {
      for (const FenceTicket& grant : grants) shared_.asked.erase(grant.slot);
      return Status::ok();
    }
    const std::int64_t now = now_ns();
    if (now >= deadline_ns) {
      return Status(Code::kTimedOut, "it did not say in time that it has left the grant");
    }
    if (now < spin_until) continue;
    poller_.begin_rest();
    sleep_for_change(lock, std::min<std::int64_t>(deadline_ns - now, 1'000'000));
    poller_.end_rest();
  }
}

void RdmaChannel::take_fence_ask(const Message& message, Endings& endings) {
  if (shared_.to_answer.size() >= kMostUnanswered || shared_.outgoing.size() >= kMostUnanswered) {
    lose_locked(Status(Code::kProtocol, "the peer asks without taking the answers"), endings);
    return;
  }
  FenceToAnswer ask;
  std::memcpy(&ask.number, message.body, sizeof ask.number);
  for (std::size_t at = sizeof ask.number; at + sizeof(FenceEntry) <= message.header.body_bytes;
       at += sizeof(FenceEntry)) {
    FenceEntry entry;
    std::memcpy(&entry, message.body + at, sizeof entry);
    const FenceTicket grant{entry.slot,
                            std::uint64_t{entry.epoch_high} << 32 | entry.epoch_low};
    if (grant.slot >= kMostSlots) {
      lose_locked(Status(Code::kProtocol, "the peer asks about a grant that cannot be"), endings);
      return;
    }
    ask.grants.push_back(grant);
    std::uint64_t& last = shared_.revoked[grant.slot];
    last = std::max(last, grant.epoch);
  }
  shared_.to_answer.push_back(std::move(ask));
  poller_.add_sleeper();  // The owner waits.
  for (Progress* progress : std::vector(shared_.running)) {
    if (progress->operation->nbytes == 0 || !is_revoked(progress->operation->fence)) continue;
    progress->operation->fail(revoked());
    give_up_rest(*progress, endings);
  }
}

void RdmaChannel::answer_fences() {
  std::erase_if(shared_.to_answer, [this](const FenceToAnswer& ask) KVZC_REQUIRES(shared_.mutex) {
    const bool is_within = std::any_of(
        shared_.running.begin(), shared_.running.end(), [&](const Progress* progress) {
          const Operation& operation = *progress->operation;
          return operation.nbytes > 0 &&
                 std::any_of(ask.grants.begin(), ask.grants.end(), [&](const FenceTicket& grant) {
                   return grant.slot == operation.fence.slot && operation.fence.epoch <= grant.epoch;
                 });
        });
    if (is_within) return false;
    queue_message(MessageType::kFenceDone, Code::kOk,
                  std::as_bytes(std::span(&ask.number, 1)), 0);
    poller_.remove_sleeper();
    return true;
  });
}

// --- Rails that break, and the end ---

bool RdmaChannel::has_live_rail() const {
  return std::any_of(shared_.pairs.begin(), shared_.pairs.end(),
                     [](const auto& pair) { return pair->is_alive(); });
}

bool RdmaChannel::are_all_drained() const {
  return std::all_of(shared_.pairs.begin(), shared_.pairs.end(),
                     [](const auto& pair) { return pair->is_broken() && pair->is_drained(); });
}

void RdmaChannel::break_rail(QueuePair& pair, const std::string& why) {
  pair.break_off();
  shared_.last_break = pair.rail().device().info().name + ": " + why;
  shared_.why_out[pair.rail().index()] = shared_.last_break;
}

void RdmaChannel::look_at_broken_rails(Endings& endings) {
  for (const auto& pair : shared_.pairs) {
    if (!pair->is_broken()) continue;
    pair->complete_refused([&](const Posted& entry) KVZC_REQUIRES(shared_.mutex) {
      came_back(*pair, entry, false, endings);
    });
    const std::size_t rail = pair->rail().index();
    if (shared_.is_lost) {
      release_orphans(rail, endings);
      continue;
    }
    if (!shared_.has_said_close[rail]) {
      shared_.has_said_close[rail] = true;
      if (const int error = pair->refusal(); error != 0) {
        break_rail(*pair, std::string("it takes no more work requests: ") + std::strerror(error));
      }
      if (!has_live_rail()) {
        lose_locked(Status(Code::kPeerLost, "no rail to it is left; " + shared_.last_break), endings);
        return;
      }
      queue_message(MessageType::kRailClose, Code::kOk, {}, rail);
    }
    if (pair->is_drained() && !shared_.has_said_closed[rail]) {
      shared_.has_said_closed[rail] = true;
      queue_message(MessageType::kRailClosed, Code::kOk, {}, rail);
    }
    pump_messages();
    (void)ring();
    if (!pair->is_drained()) continue;
    // What the peer's end had not taken by then it never takes: the bytes may go another way.
    if (shared_.is_closed_there[rail]) release_orphans(rail, endings);
  }
}

void RdmaChannel::release_orphans(std::size_t rail, Endings& endings) {
  if (shared_.orphans[rail].empty()) return;
  for (const Piece& piece : std::exchange(shared_.orphans[rail], {})) {
    Progress& progress = *piece.progress;
    if (piece.nbytes > 0 && !progress.operation->has_failed() && !shared_.is_lost) {
      shared_.again.push_back(piece);
      continue;
    }
    --progress.outstanding;
    finish_if_over(progress, endings);
  }
  if (!shared_.is_lost) pump_data(endings);
  (void)ring();
}

void RdmaChannel::rail_is_down(std::size_t rail, const char* why, bool is_fatal, Endings& endings) {
  {
    const LockAhead lock(shared_);
    if (rail >= shared_.pairs.size()) return;
    QueuePair& pair = *shared_.pairs[rail];
    const auto live = std::count_if(shared_.pairs.begin(), shared_.pairs.end(),
                                    [](const auto& each) { return each->is_alive(); });
    if (!pair.is_alive() || (live < 2 && !is_fatal)) return;
    break_rail(pair, why);
  }
  settle_break(endings);
}

void RdmaChannel::watch(Endings& endings) {
  bool must_settle = false;
  {
    const LockAhead lock(shared_);
    must_settle = must_pump();  // Nothing should be left over; what is does not wait for ever.
    for (const auto& pair : shared_.pairs) {
      if (!pair->is_alive() || pair->count_still() < most_still_) continue;
      break_rail(*pair, "nothing comes back, and its device does not say why; the way " +
                            pair->path() + " leads nowhere");
      must_settle = true;
    }
  }
  if (must_settle) settle_break(endings);
}

void RdmaChannel::settle_break(Endings& endings) {
  bool must_tell_loss = false;
  {
    const LockAhead lock(shared_);
    pump(endings);
    must_tell_loss = std::exchange(shared_.must_tell_loss, false);
  }
  if (must_tell_loss) tell_loss();
}

void RdmaChannel::sleep_for_change(UniqueLock<ShortMutex>& lock, std::int64_t timeout_ns) {
  ++shared_.watchers;
  shared_.changed.wait_for(lock, std::chrono::nanoseconds(timeout_ns));
  --shared_.watchers;
}

void RdmaChannel::tell_loss() {
  host_.doorbell.ring();
  host_.peers.channel_lost(peer_.token);
}

void RdmaChannel::lose_locked(Status why, Endings& endings) {
  if (shared_.is_lost) return;
  shared_.lost_why = std::move(why);
  shared_.is_lost.store(true, std::memory_order_release);
  shared_.must_tell_loss = true;
  for (const auto& pair : shared_.pairs) pair->break_off();
  shared_.outgoing.clear();
  for (; !shared_.to_answer.empty(); shared_.to_answer.pop_back()) poller_.remove_sleeper();
  shared_.to_flush.clear();  // The loop below ends them.
  for (Progress* progress : std::vector(shared_.running)) {
    progress->operation->fail(shared_.lost_why);
    give_up_rest(*progress, endings);
  }
  look_at_broken_rails(endings);
  tell_change();
}

void RdmaChannel::lose(Status why, PeerFate) {
  {
    Endings endings(host_.operations);
    const LockAhead lock(shared_);
    lose_locked(std::move(why), endings);
    shared_.must_tell_loss = false;  // Whoever says so knows.
  }
  host_.doorbell.ring();
}

Status RdmaChannel::cut_off(std::int64_t deadline_ns) {
  for (;;) {
    (void)poller_.help();
    UniqueLock lock(shared_.mutex);
    if (are_all_drained()) return Status::ok();
    if (now_ns() >= deadline_ns) {
      return Status(Code::kTimedOut, "its queue pairs here have not given back all receives");
    }
    sleep_for_change(lock, 50'000);
  }
}

Status RdmaChannel::lost() const {
  if (!shared_.is_lost.load(std::memory_order_acquire)) return Status::ok();
  const MutexLock lock(shared_.mutex);
  return shared_.lost_why;
}

std::string RdmaChannel::explain(const RemoteMemory&) const {
  const MutexLock lock(shared_.mutex);
  std::string out;
  std::size_t live = 0;
  for (const auto& pair : shared_.pairs) {
    const std::size_t rail = pair->rail().index();
    if (!out.empty()) out += "; ";
    out += "rail " + std::to_string(rail) + " ";
    if (pair->is_alive()) {
      out += pair->path();
      ++live;
    } else {
      out += "is out (" + (shared_.why_out[rail].empty() ? "the peer closed it" : shared_.why_out[rail]) + ")";
    }
  }
  if (live > 1) {
    out += "; transfers from " + std::to_string(host_.rdma.least_striped_bytes) +
           " bytes on go over all of them, shorter ones over the one with the least under way";
  }
  return out;
}

bool RdmaChannel::is_quiet() const {
  const MutexLock lock(shared_.mutex);
  return std::all_of(shared_.pairs.begin(), shared_.pairs.end(),
                     [](const auto& pair) { return pair->posted_count() == 0; });
}

}  // namespace kvzc::rdma
