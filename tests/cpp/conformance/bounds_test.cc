// What must not be written is refused, and nothing has moved.
#include "base/bytes.h"
#include "base/sha256.h"
#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class BoundsTest : public Conformance {
 protected:
  static constexpr std::uint64_t kBytes = 65536;

  // The writer tries something that must be refused; the owner then finds its memory unchanged.
  void run_refused(const std::function<void(Engine&, const RemoteView&, const LocalView&)>& attempt,
                   bool close_region_first = false) {
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, kBytes);
          fill(memory.data(), kBytes, 1);
          party.tell(memory.handle_text());
          if (close_region_first) {
            party.hear();
            const Status closed = memory.region.close(in_seconds(30));
            EXPECT_TRUE(closed.is_ok()) << closed.to_string();
            party.tell("closed");
          }
          party.hear();
          EXPECT_EQ(first_difference(memory.data(), kBytes, 1), -1);
          party.tell("seen");
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          const RemoteView target = open_handle(party.hear());
          std::vector<std::byte> source(kBytes, std::byte{0xaa});
          const LocalView view = view_of(*engine, source.data(), kBytes);
          if (close_region_first) {
            // Connected and mapped before the owner closes.
            const Transfer warm = engine->connect(target).take();
            ASSERT_TRUE(warm.wait(in_seconds(30)).is_ok());
            party.meet();
          }
          attempt(*engine, target, view);
          EXPECT_EQ(engine->stats().transfers_running, 0u);
          party.meet();
        });
  }

  // Starts a put and gives how it was refused, at once or in the end.
  static Code outcome(Engine& engine, const LocalView& source, const RemoteView& target) {
    const TransferItem item{&source, &target};
    Result<Transfer> transfer = engine.put({&item, 1}, {}, in_seconds(30));
    if (!transfer.is_ok()) return transfer.status().code();
    EXPECT_TRUE(transfer->wait(in_seconds(30)).is_ok());
    return transfer->status().code();
  }
};

TEST_P(BoundsTest, AnIndexBeyondTheShapeIsRefused) {
  run_refused([](Engine&, const RemoteView& target, const LocalView&) {
    for (const std::int64_t at :
         {std::int64_t{kBytes}, -std::int64_t{kBytes} - 1, INT64_MAX, INT64_MIN}) {
      const Index index = at;
      EXPECT_EQ(target.index({&index, 1}).status().code(), Code::kOutOfRange) << at;
      const Index list = std::make_shared<const std::vector<std::int64_t>>(1, at);
      EXPECT_EQ(target.index({&list, 1}).status().code(), Code::kOutOfRange) << at;
    }
    // A slice ends with the axis, as Python's do.
    EXPECT_EQ(slice(target, 10, 2 * std::int64_t{kBytes}).view.nbytes(), kBytes - 10);
    EXPECT_EQ(slice(target, kBytes, INT64_MAX).view.nbytes(), 0u);
    EXPECT_EQ(slice(target, INT64_MIN, INT64_MAX).view.nbytes(), kBytes);
  });
}

TEST_P(BoundsTest, ADifferentShapeIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    EXPECT_EQ(outcome(engine, slice(view, 0, 100), slice(target, 0, 101)), Code::kLayoutMismatch);
    EXPECT_EQ(outcome(engine, slice(view, 0, 1), slice(target, 0, 0)), Code::kLayoutMismatch);
  });
}

TEST_P(BoundsTest, ADifferentDtypeIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    LocalView other = view;
    other.view.tensors[0].dtype = DType::kInt8;
    EXPECT_EQ(outcome(engine, other, target), Code::kLayoutMismatch);
  });
}

TEST_P(BoundsTest, ATargetThatNamesABlockTwiceIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    const Index twice = std::make_shared<const std::vector<std::int64_t>>(
        std::initializer_list<std::int64_t>{5, 9, 5});
    EXPECT_EQ(outcome(engine, slice(view, 0, 3), target.index({&twice, 1}).take()),
              Code::kInvalidArgument);
  });
}

TEST_P(BoundsTest, TwoTargetsThatShareAByteAreRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    const LocalView source = slice(view, 0, 100);
    const RemoteView first = slice(target, 0, 100);
    const RemoteView second = slice(target, 99, 199);
    const TransferItem items[] = {{&source, &first}, {&source, &second}};
    EXPECT_EQ(engine.try_put(items, {}).status().code(), Code::kInvalidArgument);
  });
}

TEST_P(BoundsTest, ATagThatIsTooLongIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    const std::string tag(kMaxTagBytes + 1, 'x');
    TransferOptions options;
    options.notify = tag;
    const TransferItem item{&view, &target};
    EXPECT_EQ(engine.try_put({&item, 1}, options).status().code(), Code::kInvalidArgument);
  });
}

TEST_P(BoundsTest, AForgedKeyIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    HandleInfo forged = target.handle->info;
    forged.key[7] ^= std::byte{1};
    const RemoteView other = RemoteView::from_bytes(encode_handle(forged).take()).take();
    EXPECT_EQ(outcome(engine, view, other), Code::kBadHandle);
    EXPECT_EQ(outcome(engine, view, other), Code::kBadHandle);
  });
}

TEST_P(BoundsTest, AForgedKeyIsRefusedOnAConnectionThatStands) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    const Transfer warm = engine.connect(target).take();
    ASSERT_TRUE(warm.wait(in_seconds(30)).is_ok());
    ASSERT_TRUE(warm.status().is_ok());
    HandleInfo forged = target.handle->info;
    forged.key[31] ^= std::byte{0x80};
    const RemoteView other = RemoteView::from_bytes(encode_handle(forged).take()).take();
    EXPECT_EQ(outcome(engine, view, other), Code::kBadHandle);
  });
}

TEST_P(BoundsTest, AGrantThatWasNeverMadeIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    HandleInfo forged = target.handle->info;
    forged.grant_id += 5;
    const RemoteView other = RemoteView::from_bytes(encode_handle(forged).take()).take();
    EXPECT_EQ(outcome(engine, view, other), Code::kRevoked);
  });
}

TEST_P(BoundsTest, AnotherIncarnationIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    HandleInfo old = target.handle->info;
    old.incarnation[0] ^= std::byte{1};
    const RemoteView other = RemoteView::from_bytes(encode_handle(old).take()).take();
    EXPECT_EQ(outcome(engine, view, other), Code::kStaleHandle);
  });
}

TEST_P(BoundsTest, AHandleThatClaimsMoreThanTheOwnerHasIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    HandleInfo larger = target.handle->info;
    larger.storage_nbytes[0] *= 2;
    larger.view.tensors[0].axes[0].size *= 2;
    const RemoteView other = RemoteView::from_bytes(encode_handle(larger).take()).take();
    const RemoteView beyond = slice(other, kBytes, 2 * kBytes);
    EXPECT_EQ(outcome(engine, view, beyond), Code::kBadHandle);
  });
}

TEST_P(BoundsTest, AGetOnlyHandleTakesNoPut) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    HandleInfo info = target.handle->info;
    info.access = Access::kGet;
    const RemoteView other = RemoteView::from_bytes(encode_handle(info).take()).take();
    EXPECT_EQ(outcome(engine, view, other), Code::kAccessDenied);
  });
}

TEST_P(BoundsTest, AClosedRegionTakesNoPut) {
  run_refused(
      [](Engine& engine, const RemoteView& target, const LocalView& view) {
        EXPECT_EQ(outcome(engine, view, target), Code::kRevoked);
        EXPECT_EQ(outcome(engine, slice(view, 0, 1), slice(target, 0, 1)), Code::kRevoked);
        const RemoteView fresh =
            RemoteView::from_bytes(encode_handle(target.handle->info).take()).take();
        EXPECT_EQ(outcome(engine, view, fresh), Code::kRevoked);
      },
      true);
}

TEST_P(BoundsTest, TargetsOfTwoHandlesInOneTransferAreRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    HandleInfo info = target.handle->info;
    info.grant_id += 1;
    const RemoteView other = slice(handle_of(info), 100, 200);
    const RemoteView first = slice(target, 0, 100);
    const LocalView source = slice(view, 0, 100);
    const TransferItem items[] = {{&source, &first}, {&source, &other}};
    EXPECT_EQ(engine.try_put(items, {}).status().code(), Code::kInvalidArgument);
  });
}

TEST_P(BoundsTest, AHandleThatClaimsAnotherStorageIsRefused) {
  run_refused([](Engine& engine, const RemoteView& target, const LocalView& view) {
    HandleInfo info = target.handle->info;
    info.storage_nbytes.push_back(kBytes);
    EXPECT_EQ(outcome(engine, view, handle_of(info)), Code::kBadHandle);
  });
}

TEST_P(BoundsTest, AnOldHandleDoesNotOpenTheNextGrant) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine([](EngineOptions& options) { options.max_grants = 2; });
        std::string old;
        for (int round = 0; round < 6; ++round) {
          OwnedMemory memory = make_memory(*engine, 64);
          const std::string handle = memory.handle_text();
          ASSERT_FALSE(handle.empty()) << "round " << round;
          party.tell(old.empty() ? handle : old);
          EXPECT_EQ(party.hear(), old.empty() ? "Ok" : "Revoked") << "round " << round;
          EXPECT_TRUE(memory.region.close(in_seconds(30)).is_ok());
          if (round != 0) {
            EXPECT_EQ(memory.data()[0], std::byte{});
          }
          old = handle;
        }
        party.tell("");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const std::byte one[64] = {std::byte{1}};
        std::byte source[64];
        std::copy(one, one + 64, source);
        const LocalView view = view_of(*engine, source, sizeof source);
        for (std::string text = party.hear(); !text.empty(); text = party.hear()) {
          const Code code = outcome(*engine, view, open_handle(text));
          party.tell(code == Code::kOk ? "Ok" : code == Code::kRevoked ? "Revoked" : "another");
        }
      });
}

TEST_P(BoundsTest, APutIntoItsOwnSourceIsRefusedAndKeepsNoRoomForItsTag) {
  run(
      [](Party& party) {
        auto owner =
            party.make_engine([](EngineOptions& options) { options.tuning.arrival_depth = 4; });
        OwnedMemory memory = make_memory(*owner, 200);
        fill(memory.data(), 200, 1);
        auto writer = party.make_engine([&](EngineOptions& options) {
          options.allocator = std::shared_ptr<SharedAllocator>(owner, &owner->allocator());
        });
        const RemoteView target = open_handle(memory.handle_text());
        ASSERT_TRUE(writer->connect(target)->wait(in_seconds(30)).is_ok());
        const LocalView view = view_of(*writer, memory.data(), 200);
        TransferOptions options;
        options.notify = "tag";
        for (int i = 0; i < 10; ++i) {
          const LocalView from = slice(view, 0, 100);
          const RemoteView to = slice(target, 99, 199);
          const TransferItem item{&from, &to};
          EXPECT_EQ(writer->try_put({&item, 1}, options).status().code(), Code::kInvalidArgument);
        }
        EXPECT_EQ(first_difference(memory.data(), 200, 1), -1);
        put_and_wait(*writer, slice(view, 0, 100), slice(target, 100, 200), "tag");
        EXPECT_EQ(first_difference(memory.data() + 100, 100, 1), -1);
      },
      [](Party&) {});
}

KVZC_CONFORMANCE(BoundsTest);

}  // namespace
}  // namespace kvzc::conformance
