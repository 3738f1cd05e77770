// The shared memory as a peer writes it that keeps none of its promises: tags, marks and counts.
#include <cstring>

#include "fuzz/shm_host.h"
#include "transport/shm/copy_pool.h"
#include "transport/shm/shm_channel.h"

namespace kvzc {
namespace {

constexpr std::uint32_t kDepth = 8;

// Reads the ring as cpp/WIRE.md says. Gives whether all of it was sound.
bool read_ring(const shm::Outbox& outbox, std::uint64_t* head, std::uint64_t tail,
               std::uint64_t room, std::vector<std::pair<std::string, Code>>* out) {
  const auto at = [&](std::uint64_t position) {
    return std::to_integer<std::uint8_t>(outbox.page().ring()[position % fuzz::kRingBytes]);
  };
  if (tail - *head > fuzz::kRingBytes) return false;
  while (*head != tail) {
    const std::uint8_t nbytes = at(*head);
    const std::uint64_t record = 8 + (nbytes + 7u) / 8 * 8;
    if (nbytes > kMaxTagBytes || record > tail - *head || room-- == 0) return false;
    std::string tag;
    for (std::uint64_t i = 0; i < nbytes; ++i) tag += static_cast<char>(at(*head + 8 + i));
    out->emplace_back(tag, code_from_wire(at(*head + 1)));
    *head += record;
  }
  return true;
}

}  // namespace

KVZC_FUZZ_TARGET(shm_ring)(fuzz::Bytes input) {
  static fuzz::Host host(TransportTuning{.tag_ring_bytes = fuzz::kRingBytes, .arrival_depth = kDepth});
  static shm::CopyPool pool(1, host);
  host.arrivals.clear();
  const OwnedFd memory = fuzz::make_memory(sizeof(shm::OutboxPage) + fuzz::kRingBytes);
  const OwnedFd bell = fuzz::make_memory(192);
  const auto copy = [](const OwnedFd& fd) { return OwnedFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)); };
  // The peer's own mapping.
  const shm::Outbox theirs = fuzz::Host::must(shm::Outbox::open(copy(memory), fuzz::kRingBytes));
  shm::PeerSide side;
  side.outbox = fuzz::Host::must(shm::Outbox::open(copy(memory), fuzz::kRingBytes));
  side.doorbell = fuzz::Host::must(
      Doorbell::open(copy(bell), OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))));
  side.fences = fuzz::Host::must(FenceBoard::open(fuzz::make_memory(8 * fuzz::kSlots), fuzz::kSlots));
  side.arrival_depth = kDepth;
  fuzz::Input in(input);
  side.shows_threads = in.u8() % 2 == 0;
  shm::Outbox own = fuzz::Host::must(shm::Outbox::create(fuzz::kRingBytes));
  auto& reader = own.page().reader;  // Which is what the peer writes of ours.
  ChannelPeer peer;
  peer.process.pid = getpid();
  peer.kick = [](void*) { return true; };
  shm::ShmChannel channel(host.lent, pool, std::move(own), std::move(side), peer);

  std::uint64_t head = 0, taken = 0;
  std::vector<std::pair<std::string, Code>> expected;
  for (int steps = 0; steps < 16 && !in.is_at_end(); ++steps) {
    switch (in.u8() % 10) {
      case 0: {
        const std::uint16_t at = in.u16();
        const fuzz::Bytes bytes = in.part();
        theirs.write(at, bytes.data(), bytes.size());
        break;
      }
      case 1:
        theirs.page().writer.tail += in.u16();
        break;
      case 2:
        theirs.page().writer.tail = in.u64();
        break;
      case 3: {
        const std::uint8_t at = in.u8();
        theirs.page().busy[at % shm::kBusyMarks].mark = in.u64();
        break;
      }
      case 4:
        reader.head = in.u64();
        reader.taken = in.u64();
        reader.credit_count = in.u8();
        reader.credit_sleepers = in.u8();
        break;
      case 5: {
        const bool was_lost = !channel.lost().is_ok();
        const bool is_sound = read_ring(theirs, &head, theirs.page().writer.tail,
                                        kDepth - (expected.size() - taken), &expected);
        channel.drain();
        if (was_lost) return;
        KVZC_FUZZ_CHECK(channel.lost().is_ok() == is_sound);
        KVZC_FUZZ_CHECK(host.arrivals == expected);
        if (!is_sound) return;
        KVZC_FUZZ_CHECK(theirs.page().reader.head == head);
        break;
      }
      case 6:
        if (taken < expected.size()) {
          ++taken;
          channel.grant_credits(1);
        }
        break;
      case 7: {
        const std::size_t nbytes = in.u8() % (kMaxTagBytes + 1);
        if (!channel.take_credit(nbytes).is_ok()) {
          channel.wait_for_credit(nbytes, 1);
          break;
        }
        Tag tag;
        std::memset(tag.bytes, 7, nbytes);
        tag.nbytes = static_cast<std::uint8_t>(nbytes);
        if (in.u8() % 2 == 0) {
          channel.send_tag(tag, Code::kOk);
        } else {
          channel.return_credit(nbytes);
        }
        break;
      }
      case 8: {
        const FenceTicket ticket{in.u16(), host.fences.epoch(0)};
        (void)channel.look_at_grant(ticket);
        (void)channel.fence({&ticket, 1}, 0);
        break;
      }
      default:
        channel.lose(Status(Code::kClosed, "the end"), PeerFate::kUnknown);
        (void)channel.cut_off(0);
        (void)channel.is_quiet();
        return;
    }
  }
}

}  // namespace kvzc
