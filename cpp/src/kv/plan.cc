#include "kvzc/plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/spread.h"

namespace kvzc {
namespace {

// Names one tensor of a group, for errors.
std::string which(const View& view, std::size_t number) {
  return view.is_group() ? "tensor '" + view.names[number] + "': " : std::string();
}

// Takes the block axis off: gives block 0 and how far it is from one block to the next.
struct BlockView {
  TensorView block;
  std::int64_t count;
  std::int64_t step;
};

Result<BlockView> block_of(const TensorView& tensor, std::size_t axis) {
  const Axis& blocks = tensor.axes[axis];
  if (blocks.list) {
    return Status(Code::kUnsupported,
                  "the block axis was indexed with a list; plan with the whole tensor, and name the "
                  "blocks when they move");
  }
  BlockView out{tensor, blocks.size, blocks.stride};
  out.block.axes.erase(out.block.axes.begin() + static_cast<std::ptrdiff_t>(axis));
  return out;
}

// Where the bytes of a storage are counted from, and among which other bytes they may be.
struct Place {
  std::uint64_t space;
  std::uint64_t begin;
};

// Refuses tensors of which two share bytes, since any two blocks may be written by one transfer.
template <typename PlaceOf>
Status check_disjoint(const View& view, const PlaceOf& place_of) {
  struct Bytes {
    std::uint64_t space;
    std::uint64_t begin;
    std::uint64_t end;
    std::size_t tensor;
  };
  const auto first_shared = [](std::vector<Bytes>& all) {
    std::sort(all.begin(), all.end(), [](const Bytes& a, const Bytes& b) {
      return std::tie(a.space, a.begin) < std::tie(b.space, b.begin);
    });
    return std::adjacent_find(all.begin(), all.end(), [](const Bytes& a, const Bytes& b) {
      return a.space == b.space && b.begin < a.end;
    });
  };
  // Mostly their hulls are disjoint already.
  std::vector<Bytes> all;
  for (std::size_t i = 0; i < view.tensors.size(); ++i) {
    const TensorView& tensor = view.tensors[i];
    if (tensor.numel() == 0) continue;
    const Result<Extent> extent = extent_of(tensor);
    if (!extent.is_ok()) return extent.status();
    const Place place = place_of(tensor.storage);
    all.push_back({place.space, place.begin + static_cast<std::uint64_t>(tensor.offset + extent->begin),
                   place.begin + static_cast<std::uint64_t>(tensor.offset + extent->end), i});
  }
  if (first_shared(all) == all.end()) return Status::ok();
  all.clear();
  std::vector<Run> runs;
  for (std::size_t i = 0; i < view.tensors.size(); ++i) {
    runs.clear();
    const std::uint64_t left = kMostRuns - all.size();
    if (cut_runs(view.tensors[i], nullptr, view.tensors[i], runs, left) > left) {
      return Status(Code::kLimitExceeded,
                    which(view, i) + "interleaves with others of its group in more than " +
                        std::to_string(kMostRuns) + " pieces, too many to compare; plan them apart");
    }
    const Place place = place_of(view.tensors[i].storage);
    for (const Run& run : runs) {
      all.push_back({place.space, place.begin + run.remote, place.begin + run.remote + run.nbytes, i});
    }
  }
  const auto shared = first_shared(all);
  if (shared == all.end()) return Status::ok();
  return Status(Code::kInvalidArgument,
                which(view, shared->tensor) + "shares bytes with " +
                    (view.is_group() ? "tensor '" + view.names[std::next(shared)->tensor] + "'"
                                     : std::string("itself")) +
                    "; blocks of one transfer must not overlap");
}

Status check_ids(std::span<const std::int64_t> ids, std::int64_t count, const char* side) {
  const auto wrong = std::find_if(ids.begin(), ids.end(),
                                  [&](std::int64_t id) { return id < 0 || id >= count; });
  if (wrong == ids.end()) return Status::ok();
  return Status(Code::kOutOfRange,
                std::string("entry ") + std::to_string(wrong - ids.begin()) + " of the " + side +
                    " blocks is " + std::to_string(*wrong) + "; there are " +
                    (count > 0 ? "blocks 0 to " + std::to_string(count - 1) : std::string("none")));
}

// Refuses an entry that is named twice.
template <typename Id>
Status check_once(std::span<const Id> ids, const char* what) {
  if (ids.size() < 2) return Status::ok();
  const Spread spread = spread_of(ids);
  if (spread.closest != 0) return Status::ok();
  return Status(Code::kInvalidArgument, std::string(what) + " " + std::to_string(spread.twice) +
                                            " is named twice; each byte can be written once per "
                                            "transfer");
}

}  // namespace

Result<std::shared_ptr<const Plan>> Plan::create(LocalView local, RemoteView remote,
                                                 std::int64_t block_axis) {
  const std::size_t count = local.view.tensors.size();
  if (count != remote.view.tensors.size()) {
    return Status(Code::kLayoutMismatch,
                  "the local side has " + std::to_string(count) + " tensors and the remote " +
                      std::to_string(remote.view.tensors.size()) +
                      "; a plan pairs them in order, pick the same number on both sides");
  }
  std::shared_ptr<Plan> out(new Plan(std::move(local), std::move(remote)));
  for (std::size_t i = 0; i < count; ++i) {
    Status added = out->add_layer(i, block_axis);
    if (!added.is_ok()) {
      return Status(added.code(), which(out->remote_.view, i) + std::string(added.text()));
    }
  }
  // Either side may be written.
  for (const View* view : {&out->local_.view, &out->remote_.view}) {
    for (std::size_t i = 0; i < count; ++i) {
      Status once = check_no_overlap(view->tensors[i]);
      if (!once.is_ok()) return Status(once.code(), which(*view, i) + std::string(once.text()));
    }
  }
  // Storages of this process may overlap, those of the other side are told apart by their number.
  Status disjoint = check_disjoint(out->local_.view, [&](std::uint32_t storage) {
    return Place{0, reinterpret_cast<std::uint64_t>(out->local_.memory->storages[storage]->data)};
  });
  if (disjoint.is_ok()) {
    disjoint = check_disjoint(out->remote_.view,
                              [](std::uint32_t storage) { return Place{storage, 0}; });
  }
  if (!disjoint.is_ok()) return disjoint;
  return std::shared_ptr<const Plan>(std::move(out));
}

Status Plan::add_layer(std::size_t number, std::int64_t block_axis) {
  const TensorView& local = local_.view.tensors[number];
  const TensorView& remote = remote_.view.tensors[number];
  const auto rank = static_cast<std::int64_t>(local.axes.size());
  const auto mismatch = [&] {
    return Status(Code::kLayoutMismatch,
                  "the local side is " + local.describe() + " and the remote " + remote.describe() +
                      "; dtypes and shapes must be equal but for the number of blocks");
  };
  if (local.dtype != remote.dtype || local.axes.size() != remote.axes.size()) return mismatch();
  if (block_axis < -rank || block_axis >= rank) {
    return Status(Code::kOutOfRange, "block_axis " + std::to_string(block_axis) + " is not an axis of " +
                                         local.describe());
  }
  const auto axis = static_cast<std::size_t>(block_axis < 0 ? block_axis + rank : block_axis);
  for (std::size_t i = 0; i < local.axes.size(); ++i) {
    if (i != axis && local.axes[i].size != remote.axes[i].size) return mismatch();
  }
  Result<BlockView> here = block_of(local, axis);
  if (!here.is_ok()) return here.status();
  Result<BlockView> there = block_of(remote, axis);
  if (!there.is_ok()) return there.status();
  if (number > 0 && (here->count != local_blocks_ || there->count != remote_blocks_)) {
    return Status(Code::kLayoutMismatch, "its number of blocks is not that of the first tensor");
  }
  local_blocks_ = here->count;
  remote_blocks_ = there->count;

  Layer layer{local.storage, remote.storage, {}};
  std::vector<Run> runs;
  std::byte* const data = local_.memory->storages[local.storage]->data;
  if (cut_runs(here->block, data, there->block, runs, kMostRuns) > kMostRuns) {
    return Status(Code::kLimitExceeded,
                  "a block falls into more than " + std::to_string(kMostRuns) +
                      " separate pieces; make one side contiguous in the other's order first");
  }
  layer.pieces.reserve(runs.size());
  for (const Run& run : runs) {
    layer.pieces.push_back({run.local - data, static_cast<std::int64_t>(run.remote),
                            static_cast<std::int64_t>(run.nbytes), here->step, there->step});
  }
  layers_.push_back(std::move(layer));
  return Status::ok();
}

std::vector<std::string> Plan::layer_names() const {
  return remote_.view.is_group() ? remote_.view.names : std::vector<std::string>{""};
}

std::uint64_t Plan::block_nbytes() const {
  std::uint64_t total = 0;
  for (const Layer& layer : layers_) {
    for (const Piece& piece : layer.pieces) total += static_cast<std::uint64_t>(piece.nbytes);
  }
  return total;
}

std::size_t Plan::block_pieces() const {
  std::size_t count = 0;
  for (const Layer& layer : layers_) count += layer.pieces.size();
  return count;
}

Status Plan::check(const Blocks& blocks, Direction direction) const {
  if (blocks.local.size() != blocks.remote.size()) {
    return Status(Code::kInvalidArgument,
                  "there are " + std::to_string(blocks.local.size()) + " local blocks and " +
                      std::to_string(blocks.remote.size()) + " remote ones; they are paired in order");
  }
  for (const std::uint32_t layer : blocks.layers) {
    if (layer >= layers_.size()) {
      return Status(Code::kOutOfRange, "layer " + std::to_string(layer) + " is out of range: there are " +
                                           std::to_string(layers_.size()));
    }
  }
  Status status = check_ids(blocks.local, local_blocks_, "local");
  if (status.is_ok()) status = check_ids(blocks.remote, remote_blocks_, "remote");
  if (status.is_ok()) {
    status = check_once(blocks.layers, "layer");
  }
  if (!status.is_ok()) return status;
  const bool is_put = direction == Direction::kPut;
  return check_once(is_put ? blocks.remote : blocks.local, "block");
}

class Plan::Cutter final : public RunCutter {
 public:
  Cutter(const Plan& plan, const Blocks& blocks, Direction direction)
      : plan_(plan), blocks_(blocks), direction_(direction) {}

  const std::shared_ptr<const RegionMemory>& local() const override { return plan_.local_.memory; }
  const RemoteView& remote() const override { return plan_.remote_; }
  Status cut(RunList& runs) const override {
    if (Status status = plan_.check(blocks_, direction_); !status.is_ok()) return status;
    // Neighbours on both sides, found once for all layers.
    thread_local std::vector<Stretch> stretches;
    stretches.clear();
    for (std::size_t i = 0; i < blocks_.local.size(); ++i) {
      const std::int64_t here = blocks_.local[i];
      const std::int64_t there = blocks_.remote[i];
      if (!stretches.empty() && here == stretches.back().local + stretches.back().count &&
          there == stretches.back().remote + stretches.back().count) {
        ++stretches.back().count;
      } else {
        stretches.push_back({here, there, 1});
      }
    }
    if (stretches.empty()) return Status::ok();
    std::uint64_t count = 0;
    for (const std::uint32_t number : blocks_.layers) {
      for (const Piece& piece : plan_.layers_[number].pieces) {
        count += piece.is_joined() ? stretches.size() : blocks_.local.size();
        if (count > kMostRuns) break;
      }
    }
    if (Status room = runs.reserve(count); !room.is_ok()) return room;
    for (const std::uint32_t number : blocks_.layers) {
      const Layer& layer = plan_.layers_[number];
      if (layer.pieces.empty()) continue;
      const LocalStorage& storage = *plan_.local_.memory->storages[layer.local_storage];
      runs.begin(storage, layer.remote_storage);
      for (const Piece& piece : layer.pieces) add(runs, storage.data + piece.local, piece, stretches);
    }
    return Status::ok();
  }

 private:
  struct Stretch {
    std::int64_t local;
    std::int64_t remote;
    std::int64_t count;
  };

  void add(RunList& runs, std::byte* local, const Piece& piece,
           const std::vector<Stretch>& stretches) const {
    const auto put_down = [&](std::int64_t here, std::int64_t there, std::int64_t count) {
      runs.add(local + here * piece.local_step,
               static_cast<std::uint64_t>(piece.remote + there * piece.remote_step),
               static_cast<std::uint64_t>(count * piece.nbytes));
    };
    if (piece.is_joined()) {
      for (const Stretch& each : stretches) put_down(each.local, each.remote, each.count);
      return;
    }
    for (std::size_t i = 0; i < blocks_.local.size(); ++i) {
      put_down(blocks_.local[i], blocks_.remote[i], 1);
    }
  }

  const Plan& plan_;
  const Blocks& blocks_;
  const Direction direction_;
};

Result<Transfer> Plan::try_move(Engine& engine, Direction direction, const Blocks& blocks,
                                const TransferOptions& options) const {
  return engine.try_run(direction, Cutter(*this, blocks, direction), options);
}

}  // namespace kvzc
