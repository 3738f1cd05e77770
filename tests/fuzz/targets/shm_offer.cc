// What a peer of this host offers of itself, and how it describes its memory.
#include <cerrno>
#include <climits>

#include "fuzz/shm_host.h"
#include "transport/shm/factory.h"

namespace kvzc {
namespace {

Blob draw_blob(fuzz::Input& in, const fuzz::SomeFds& fds) {
  Blob out;
  for (int left = in.u8() % 6; left > 0; --left) out.fds.push_back(fds.pick(in.u8()));
  const fuzz::Bytes bytes = in.part();
  out.bytes.assign(bytes.begin(), bytes.end());
  return out;
}

}  // namespace

KVZC_FUZZ_TARGET(shm_offer)(fuzz::Bytes input) {
  static fuzz::Host host(TransportTuning{.tag_ring_bytes = fuzz::kRingBytes});
  static const fuzz::SomeFds fds;
  static const std::unique_ptr<Transport> transport =
      fuzz::Host::must(shm::make_transport(host.lent));
  fuzz::Input in(input);
  // This very process, one that another user has, none that can be seen, and none that can be.
  constexpr std::array<int, 4> kPids{0, 1, INT_MAX, -1};
  const std::uint8_t who = in.u8();
  const PeerProcess owner{who % 5 == 4 ? getpid() : kPids[who % 5], 0, -1};
  if (in.u8() % 2 == 0) {
    const std::uint64_t nbytes = in.u8() % 2 == 0 ? in.u64() : in.u16();
    const auto memory = transport->import_memory(draw_blob(in, fds), nbytes, owner);
    KVZC_FUZZ_CHECK(!memory.is_ok() || (*memory)->nbytes() == nbytes);
    return;
  }
  const std::unique_ptr<ChannelHalf> half = fuzz::Host::must(transport->open_channel());
  ChannelPeer peer;
  peer.process = owner;
  peer.kick = [](void*) { return false; };
  const auto channel = half->join(draw_blob(in, fds), peer);
  if (!channel.is_ok()) return;
  (*channel)->drain();
  if ((*channel)->take_credit(5).is_ok()) (*channel)->send_tag(Tag{}, Code::kOk);
  (void)(*channel)->look_at_grant({in.u16(), in.u64()});
  (*channel)->lose(Status(Code::kClosed, "the end"), PeerFate::kUnknown);
}

}  // namespace kvzc
