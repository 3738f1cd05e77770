// QueuePair: one reliable connection to the peer on one rail, with what was posted on it.
//
// Not thread-safe: the channel's lock guards it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/rdma/message.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/registration.h"

namespace kvzc::rdma {

struct Progress;

// What one side says of its end, so that the other can connect to it.
struct QueuePairAddress {
  std::uint32_t number = 0;
  std::uint32_t first_packet = 0;
  std::uint16_t lid = 0;
  std::uint8_t mtu = IBV_MTU_1024;
  std::uint8_t most_reads = 1;  // RDMA READs it answers at the same time.
  bool is_ethernet = true;
  bool acknowledges_after_store = false;
  std::uint64_t flush_address = 0;  // A few bytes that may be read, to flush writes before it.
  std::uint32_t flush_key = 0;
  std::vector<Gid> gids;
};

// A part of an operation that is one work request.
struct Piece {
  Progress* progress = nullptr;
  std::uint32_t segment = 0;
  std::uint32_t run = 0;    // The first of the runs it covers, ...
  std::uint64_t skip = 0;   // ... less this many bytes.
  std::uint64_t nbytes = 0;
};

struct Posted {
  enum class Kind : std::uint8_t { kData, kFlush, kMessage };
  Kind kind = Kind::kData;
  std::uint16_t slot = 0;  // kMessage: where its bytes are.
  Piece piece;             // kMessage: its progress, if a transfer ends with it.
};

class QueuePair {
 public:
  static constexpr std::uint32_t kReceives = 128;
  static constexpr std::uint32_t kUntold = kReceives / 4;  // The peer is told then, at the latest.
  static constexpr std::uint32_t kReserved = 8;  // Receives that only credit messages may use.

  // Makes it and posts its receives. Errors: kLimitExceeded, kSystem.
  static Result<std::unique_ptr<QueuePair>> make(Rail& rail, CompletionTarget* target,
                                                 const RdmaOptions& options);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  Rail& rail() const { return rail_; }
  QueuePairAddress address() const;
  // Errors: kTransportUnavailable when the two ends cannot reach each other.
  Status connect(const QueuePairAddress& peer, bool is_same_host);
  // Says who is connected to whom, by which addresses.
  const std::string& path() const { return path_; }

  void hand_over(CompletionTarget* target) { rail_.hand_over(number_, target); }
  // From its return no completion is told any more. Requires: not called by the target.
  void leave() { rail_.remove(number_, completions_); }

  // --- Posting ---

  bool is_alive() const { return is_connected_ && !is_broken_; }
  // Work requests that fit now; some are kept for messages.
  bool has_room_for_data() const { return is_alive() && posted_count() + kSpare < depth_; }
  bool has_room_for_message(MessageType type) const {
    const std::uint32_t window = kReceives - (type == MessageType::kCredit ? 0 : kReserved);
    return is_alive() && posted_count() < depth_ && !free_slots_.empty() &&
           sent_messages_ - peer_consumed_ < window;
  }
  std::uint32_t most_sges() const { return most_sges_; }
  std::uint64_t outstanding_bytes() const { return outstanding_bytes_; }
  bool must_flush() const { return must_flush_; }

  // Each appends one request to the batch; post() rings the doorbell once for all of them.
  // add_data() takes its local side from where data_sges() says: room for most_sges().
  ibv_sge* data_sges() {
    if (batched_ == kBatch) (void)post();
    return sges_[batched_].data();
  }
  void add_data(Direction direction, std::size_t sges, std::uint64_t remote,
                std::uint32_t remote_key, const Piece& piece);
  void add_flush(const Piece& piece);
  void add_message(const Message& message, Progress* progress);
  // Gives false when the device refused: the pair is broken then.
  bool post() { return batched_ == 0 || post_batch(); }
  // Says whether something is left to be done for it.
  bool must_pump() const { return is_broken_ || batched_ > 0 || untold() >= kUntold; }

  // --- Completions ---

  // Takes off what was posted up to and including the request of this number; gives each, which stands
  // until `each` posts. Clang does not see that the caller holds what `each` wants.
  template <typename Each>
  void complete(std::uint32_t number, const Each& each) KVZC_NO_THREAD_SAFETY {
    while (first_ != last_ && static_cast<std::int32_t>(number - first_) >= 0) {
      const Posted& entry = ring_[first_ & ring_mask_];
      ++first_;
      if (entry.kind == Posted::Kind::kData) outstanding_bytes_ -= entry.piece.nbytes;
      each(entry);
    }
  }
  // After the pair broke: the same for requests that the device did not take, once all others have
  // come back.
  template <typename Each>
  void complete_refused(const Each& each) {
    mark();
    if (refused_ == 0 || posted_count() != refused_) return;
    refused_ = 0;
    complete(last_ - 1, each);
  }
  // The message in a receive or in a send slot.
  Message& received(std::uint32_t slot) { return buffer_->receives[slot]; }
  const Message& sent(const Posted& entry) const { return buffer_->sends[entry.slot]; }
  void free_slot(const Posted& entry) { free_slots_.push_back(entry.slot); }
  // Makes room for another message where one was received.
  void repost(std::uint32_t slot);
  void count_flushed_receive() { ++flushed_receives_; }

  // Messages, ever: what the peer has said, and what it has been told.
  std::uint32_t consumed() const { return consumed_; }
  std::uint32_t untold() const { return consumed_ - told_consumed_; }
  void told() { told_consumed_ = consumed_; }
  // Gives false when the peer says that it has taken more than was ever sent.
  [[nodiscard]] bool peer_consumed(std::uint32_t count) {
    if (static_cast<std::int32_t>(count - peer_consumed_) <= 0) return true;  // Said before.
    if (count - peer_consumed_ > sent_messages_ - peer_consumed_) return false;
    peer_consumed_ = count;
    return true;
  }

  // --- The end ---

  // Moves both directions to error: nothing is sent any more, nothing that comes in is taken.
  void break_off();
  bool is_broken() const { return is_broken_; }
  // The errno with which the device refused a work request, which broke it; or 0.
  int refusal() const { return refusal_; }
  // Says whether everything that was posted has come back.
  bool is_drained() const { return first_ == last_ && flushed_receives_ == posted_receives_; }
  std::uint32_t posted_count() const { return last_ - first_; }
  // Asked at even intervals: gives for how many of them something was posted and nothing came back.
  std::uint32_t count_still() {
    still_ = posted_count() > 0 && first_ == seen_first_ ? still_ + 1 : 0;
    seen_first_ = first_;
    return still_;
  }

  // In a wr_id: the request was a receive, and its lower half names the slot.
  static constexpr std::uint64_t kReceiveBit = std::uint64_t{1} << 63;

 private:
  static constexpr std::uint32_t kBatch = 64;
  static constexpr std::uint32_t kSpare = 16;
  static constexpr std::uint32_t kSignalEvery = 32;
  static constexpr std::uint32_t kMostSges = 16;

  struct Buffer {
    std::array<Message, kReceives> receives;
    std::array<Message, kReceives> sends;
    std::uint64_t flush_source;
    std::uint64_t flush_target;
  };

  QueuePair(Rail& rail) : rail_(rail) {}
  bool post_batch();
  ibv_send_wr& next_request(Posted::Kind kind, const Piece& piece, std::uint16_t slot = 0);
  void mark();

  Rail& rail_;
  RdmaOptions options_;
  std::uint32_t number_ = 0;  // On the rail.
  ibv_qp* pair_ = nullptr;
  std::unique_ptr<Buffer> buffer_;
  std::shared_ptr<Registration> keys_;
  std::uint32_t first_packet_ = 0;
  std::uint32_t depth_ = 0;
  std::uint32_t completions_ = 0;
  std::uint32_t most_sges_ = 1;
  std::uint32_t most_inline_ = 0;
  bool is_connected_ = false;
  bool is_broken_ = false;
  bool must_flush_ = true;
  std::uint64_t flush_address_ = 0;
  std::uint32_t flush_key_ = 0;
  std::string path_;

  // Requests that were posted and have not come back: numbers first_ to last_.
  std::vector<Posted> ring_;
  std::uint32_t ring_mask_ = 0;
  std::uint32_t first_ = 0;
  std::uint32_t last_ = 0;
  std::uint64_t outstanding_bytes_ = 0;
  std::uint32_t refused_ = 0;  // The last so many of them the device did not take.
  int refusal_ = 0;
  std::uint32_t seen_first_ = 0;  // When count_still() was asked last.
  std::uint32_t still_ = 0;
  bool must_mark_ = false;     // Of those before nothing may come back by itself.

  std::array<ibv_send_wr, kBatch> requests_{};
  std::array<std::array<ibv_sge, kMostSges>, kBatch> sges_;
  std::uint32_t batched_ = 0;

  std::vector<std::uint16_t> free_slots_;
  std::uint32_t sent_messages_ = 0;
  std::uint32_t peer_consumed_ = 0;
  std::uint32_t consumed_ = 0;
  std::uint32_t told_consumed_ = 0;
  std::uint32_t posted_receives_ = 0;
  std::uint32_t flushed_receives_ = 0;
};

inline ibv_send_wr& QueuePair::next_request(Posted::Kind kind, const Piece& piece,
                                            std::uint16_t slot) {
  if (batched_ == kBatch) (void)post();
  Posted& entry = ring_[last_ & ring_mask_];
  entry.kind = kind;
  entry.slot = slot;
  entry.piece = piece;
  ibv_send_wr& request = requests_[batched_];
  request.wr_id = std::uint64_t{number_} << 32 | last_;
  request.send_flags = last_ % kSignalEvery == 0 ? IBV_SEND_SIGNALED : 0;
  if (batched_ > 0) requests_[batched_ - 1].next = &request;
  ++last_;
  ++batched_;
  return request;
}

inline void QueuePair::add_data(Direction direction, std::size_t sges, std::uint64_t remote,
                                std::uint32_t remote_key, const Piece& piece) {
  ibv_send_wr& request = next_request(Posted::Kind::kData, piece);
  request.sg_list = sges_[batched_ - 1].data();
  request.num_sge = static_cast<int>(sges);
  request.opcode = direction == Direction::kPut ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
  request.wr.rdma.remote_addr = remote;
  request.wr.rdma.rkey = remote_key;
  if (direction == Direction::kPut && piece.nbytes <= most_inline_) {
    request.send_flags |= IBV_SEND_INLINE;
  }
  outstanding_bytes_ += piece.nbytes;
}

}  // namespace kvzc::rdma
