// LiesTest: two engines of one process on the two devices of a Soft-RoCE guest, either of which may
// lie.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conformance/peer_group.h"
#include "kvzc/engine.h"
#include "rdma/lying_verbs.h"

namespace kvzc::lies {

using namespace conformance;  // NOLINT: made to be used in tests.

using Devices = std::vector<std::string>;

inline const Devices kOneRail{"rxe0"};
inline const Devices kTwoRails{"rxe0", "rxe1"};

class LiesTest : public ::testing::Test {
 protected:
  void SetUp() override { stop_lying(); }
  // Whatever went wrong in a test: nothing is left with the devices.
  void TearDown() override {
    close();
    stop_lying();
    EXPECT_EQ(all_held(), 0);
  }

  using Change = std::function<void(EngineOptions&)>;
  static std::shared_ptr<Engine> make_engine(const std::string& name, const Devices& devices,
                                             const Change& change = {}) {
    open_as(name);
    EngineOptions options;
    options.name = name;
    options.transports = {"rdma"};
    options.rdma.devices = devices;
    // The peers of these tests answer at once, or never.
    options.rdma.ack_timeout = 12;
    if (change) change(options);
    Result<std::shared_ptr<Engine>> engine = Engine::create(std::move(options));
    EXPECT_TRUE(engine.is_ok()) << engine.status().to_string();
    return engine.is_ok() ? engine.take() : nullptr;
  }

  void open(const Devices& devices, const Change& change = {}) {
    owner_ = make_engine("owner", devices, change);
    writer_ = make_engine("writer", devices, change);
    ASSERT_TRUE(owner_ && writer_);
  }
  void close() {
    // A hang is a failure, and no more than that.
    for (const auto& engine : {writer_, owner_}) {
      if (!engine) continue;
      const Status closed = engine->close(in_seconds(20));
      EXPECT_TRUE(closed.is_ok()) << closed.to_string();
    }
    writer_.reset();
    owner_.reset();
  }

  // Memory that the owner has registered, as one axis of bytes.
  OwnedMemory own(std::uint64_t nbytes, std::uint32_t seed = 0) {
    OwnedMemory out = make_memory(*owner_, nbytes);
    fill(out.data(), nbytes, seed);
    return out;
  }

  // Gives how the transfer ended, or why it did not begin.
  static Status move(Engine& engine, Direction direction, const LocalView& local,
                     const RemoteView& remote, const TransferOptions& options = {}) {
    const TransferItem item{&local, &remote};
    Result<Transfer> transfer = direction == Direction::kPut
                                    ? engine.put({&item, 1}, options, in_seconds(20))
                                    : engine.get({&item, 1}, options, in_seconds(20));
    if (!transfer.is_ok()) return transfer.status();
    Status waited = transfer->wait(in_seconds(20));
    return transfer->has_ended() ? transfer->status() : waited;
  }
  Status put(const LocalView& local, const RemoteView& remote) {
    return move(*writer_, Direction::kPut, local, remote);
  }
  Status get(const LocalView& local, const RemoteView& remote) {
    return move(*writer_, Direction::kGet, local, remote);
  }
  // Both ends know each other, and the grant.
  void connect(const RemoteView& target) {
    const Status connected = writer_->connect(target)->wait(in_seconds(20));
    ASSERT_TRUE(connected.is_ok()) << connected.to_string();
  }

  std::shared_ptr<Engine> owner_;
  std::shared_ptr<Engine> writer_;
};

// Two axes of bytes over memory that lies there densely.
inline TensorSpec rows_of(std::byte* data, std::int64_t rows, std::int64_t row_bytes) {
  TensorSpec spec;
  spec.shape = {rows, row_bytes};
  spec.strides_bytes = {row_bytes, 1};
  spec.data = spec.storage_data = data;
  spec.storage_nbytes = static_cast<std::uint64_t>(rows * row_bytes);
  return spec;
}

// These rows of it, in this order.
template <typename AnyView>
AnyView pick(const AnyView& view, std::vector<std::int64_t> rows) {
  const Index index = std::make_shared<const std::vector<std::int64_t>>(std::move(rows));
  return view.index({&index, 1}).take();
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

}  // namespace kvzc::lies
