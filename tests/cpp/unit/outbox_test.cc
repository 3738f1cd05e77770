#include "transport/shm/outbox.h"

#include <fcntl.h>

#include <cstring>

#include "unit/unit_support.h"

namespace kvzc::shm {
namespace {

constexpr std::uint32_t kRing = 4096;

Outbox must_create(std::uint32_t ring_bytes) {
  Result<Outbox> out = Outbox::create(ring_bytes);
  EXPECT_TRUE(out.is_ok()) << out.status().to_string();
  return out.is_ok() ? out.take() : Outbox();
}

OwnedFd duplicate(const Outbox& outbox) {
  return OwnedFd(fcntl(outbox.memory().fd(), F_DUPFD_CLOEXEC, 0));
}

TEST(Outbox, BeginsIdleAndEmpty) {
  const Outbox outbox = must_create(kRing);
  EXPECT_EQ(outbox.ring_bytes(), kRing);
  EXPECT_EQ(outbox.memory().nbytes(), sizeof(OutboxPage) + kRing);
  for (const OutboxPage::BusyPlace& place : outbox.page().busy) EXPECT_EQ(place.mark, 0u);
  EXPECT_EQ(outbox.page().writer.tail, 0u);
  EXPECT_EQ(outbox.page().reader.head, 0u);
  EXPECT_EQ(outbox.page().reader.taken, 0u);
}

TEST(Outbox, ReadsBackWhatWasWrittenAtEveryPositionAcrossTheEnd) {
  const Outbox outbox = must_create(kRing);
  test::Random random(1);
  KVZC_TRACE_SEED(random);
  std::byte* const ring = outbox.page().ring();
  for (const std::size_t nbytes : {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{248},
                                   std::size_t{kRing - 1}, std::size_t{kRing}}) {
    for (const std::uint64_t turn :
         {std::uint64_t{0}, std::uint64_t{kRing} * 1000, ~std::uint64_t{0} - 2 * kRing + 1}) {
      for (std::uint64_t start = kRing - 300; start < kRing + 10; start += 3) {
        const std::uint64_t at = turn + start;
        const std::vector<std::byte> bytes = random.bytes(nbytes + 1);
        std::memset(ring, 0xee, kRing);
        outbox.write(at, bytes.data(), nbytes);
        for (std::size_t i = 0; i < kRing; ++i) {
          const std::size_t place = (at + i) % kRing;
          ASSERT_EQ(ring[place], i < nbytes ? bytes[i] : std::byte{0xee})
              << nbytes << " bytes at " << at << ", byte " << i;
        }
        std::vector<std::byte> back(nbytes + 16, std::byte{0xdd});
        outbox.read(at, back.data() + 8, nbytes);
        ASSERT_TRUE(std::equal(bytes.begin(), bytes.end() - 1, back.begin() + 8));
        for (std::size_t i = 0; i < 8; ++i) {
          ASSERT_EQ(back[i], std::byte{0xdd});
          ASSERT_EQ(back[nbytes + 8 + i], std::byte{0xdd});
        }
      }
    }
  }
}

TEST(Outbox, CarriesAStreamOfRecordsOverManyTurns) {
  const Outbox writer = must_create(kRing);
  Result<Outbox> reader = Outbox::open(duplicate(writer), kRing);
  ASSERT_TRUE(reader.is_ok()) << reader.status().to_string();
  test::Random random(2);
  KVZC_TRACE_SEED(random);
  std::uint64_t at = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::vector<std::byte> tag =
        random.bytes(static_cast<std::size_t>(random.between(1, 240)));
    const std::uint64_t taken = record_bytes(tag.size());
    writer.write(at + kRecordHeaderBytes, tag.data(), tag.size());
    std::vector<std::byte> back(tag.size());
    reader->read(at + kRecordHeaderBytes, back.data(), back.size());
    ASSERT_EQ(back, tag) << "record " << i << " at " << at;
    at += taken;
  }
}

TEST(Outbox, RoundsRecordsUpSoThatHeadsStayAligned) {
  EXPECT_EQ(record_bytes(0), 8u);
  EXPECT_EQ(record_bytes(1), 16u);
  EXPECT_EQ(record_bytes(8), 16u);
  EXPECT_EQ(record_bytes(9), 24u);
  EXPECT_EQ(record_bytes(240), 248u);
}

TEST(Outbox, IsOnePageForBothSides) {
  const Outbox writer = must_create(kRing);
  Result<Outbox> reader = Outbox::open(duplicate(writer), kRing);
  ASSERT_TRUE(reader.is_ok());
  writer.page().busy[63].mark = 17;
  writer.page().writer.tail = 99;
  reader->page().reader.head = 98;
  EXPECT_EQ(reader->page().busy[63].mark, 17u);
  EXPECT_EQ(reader->page().writer.tail, 99u);
  EXPECT_EQ(writer.page().reader.head, 98u);
  // What the two sides write does not share a line, and nothing of it lies in the ring.
  EXPECT_GE(reinterpret_cast<std::byte*>(&writer.page().reader) -
                reinterpret_cast<std::byte*>(&writer.page().writer),
            64);
  EXPECT_EQ(writer.page().ring(), writer.memory().data() + sizeof(OutboxPage));
}

TEST(Outbox, RefusesARingThatIsNoPowerOfTwoOrOutOfBounds) {
  const Outbox outbox = must_create(kRing);
  for (const std::uint32_t ring_bytes :
       {0u, 1u, 2048u, 4095u, 4097u, 12288u, 1u << 31, 0xffffffffu}) {
    EXPECT_EQ(Outbox::open(duplicate(outbox), ring_bytes).status().code(), Code::kProtocol)
        << ring_bytes;
  }
}

TEST(Outbox, RefusesMemoryThatIsSmallerThanAnnounced) {
  const Outbox outbox = must_create(kRing);
  EXPECT_EQ(Outbox::open(duplicate(outbox), 2 * kRing).status().code(), Code::kProtocol);
  Result<SharedMemory> ring_only = SharedMemory::create("kvzc-test", kRing);
  ASSERT_TRUE(ring_only.is_ok());
  OwnedFd fd(fcntl(ring_only->fd(), F_DUPFD_CLOEXEC, 0));
  EXPECT_EQ(Outbox::open(std::move(fd), kRing).status().code(), Code::kProtocol);
  EXPECT_EQ(Outbox::open(OwnedFd(), kRing).status().code(), Code::kProtocol);
}

}  // namespace
}  // namespace kvzc::shm
