// Plan: two groups of tensors that are made of blocks, checked and cut once, then moved block by block.
//
// A KV cache has one tensor per layer, or two, all of one layout; a request owns some blocks of each. What
// a block of a layer falls into is the same for every block, so a plan keeps it, and a transfer costs the
// writing down of its runs: blocks times pieces times layers, less where neighbours are neighbours on both sides.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvzc/engine.h"
#include "kvzc/status.h"

namespace kvzc {

// Constant once made. Thread: any.
class Plan {
 public:
  // Pairs the tensors of both views in order. Along `block_axis` (negative: counted from the last)
  // they may differ in size; otherwise shapes and dtypes must be equal. Errors: kLayoutMismatch;
  // kInvalidArgument where a tensor shares bytes with itself or with another of its group;
  // kOutOfRange for the axis; kUnsupported where a block axis was indexed with a list.
  static Result<std::shared_ptr<const Plan>> create(LocalView local, RemoteView remote,
                                                    std::int64_t block_axis);

  const LocalView& local() const { return local_; }
  const RemoteView& remote() const { return remote_; }
  // One per tensor of a group, or "" alone.
  std::vector<std::string> layer_names() const;
  // Blocks of each local / remote tensor.
  std::int64_t local_blocks() const { return local_blocks_; }
  std::int64_t remote_blocks() const { return remote_blocks_; }
  // One block of all layers: bytes, and pieces that are contiguous on both sides.
  std::uint64_t block_nbytes() const;
  std::size_t block_pieces() const;

  // What a transfer moves: block `local[i]` and block `remote[i]` of each of these layers, numbers as
  // in layer_names().
  struct Blocks {
    std::span<const std::int64_t> local;
    std::span<const std::int64_t> remote;
    std::span<const std::uint32_t> layers;
  };
  // Starts one transfer. Never waits. Errors: kOutOfRange, naming the entry; kInvalidArgument when
  // the lists differ in length or a block that is written, or a layer, is named twice; else as
  // Engine::try_put().
  Result<Transfer> try_move(Engine& engine, Direction direction, const Blocks& blocks,
                            const TransferOptions& options) const;

 private:
  // One contiguous part of a block: where it begins in block 0, and how far it is to the next block's.
  struct Piece {
    std::int64_t local;   // From the storage's first byte.
    std::int64_t remote;  // The same.
    std::int64_t nbytes;
    std::int64_t local_step;
    std::int64_t remote_step;
    // Neighbouring blocks continue each other on both sides.
    bool is_joined() const { return local_step == nbytes && remote_step == nbytes; }
  };
  struct Layer {
    std::uint32_t local_storage;
    std::uint32_t remote_storage;
    std::vector<Piece> pieces;
  };
  class Cutter;

  Plan(LocalView local, RemoteView remote) : local_(std::move(local)), remote_(std::move(remote)) {}
  Status add_layer(std::size_t number, std::int64_t block_axis);
  Status check(const Blocks& blocks, Direction direction) const;

  LocalView local_;
  RemoteView remote_;
  std::int64_t local_blocks_ = 0;
  std::int64_t remote_blocks_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace kvzc
