// What a peer offers of its queue pairs, and how it names its memory.
#include "fuzz/fake_verbs.h"
#include "fuzz/shm_host.h"
#include "transport/rdma/factory.h"
#include "transport/rdma/remote_memory.h"

namespace kvzc {

KVZC_FUZZ_TARGET(rdma_offer)(fuzz::Bytes input) {
  static fuzz::Host host;
  static const std::unique_ptr<Transport> transport =
      fuzz::Host::must(rdma::make_transport(host.lent));
  fuzz::forget_pairs();
  fuzz::Input in(input);
  const std::uint8_t what = in.u8();
  if (what % 2 == 0) {
    const std::uint64_t nbytes = what % 4 == 0 ? in.u64() : in.u16();
    Blob blob;
    const fuzz::Bytes bytes = in.rest();
    blob.bytes.assign(bytes.begin(), bytes.end());
    const auto memory = transport->import_memory(std::move(blob), nbytes, {});
    if (!memory.is_ok()) return;
    KVZC_FUZZ_CHECK((*memory)->nbytes() == nbytes && nbytes > 0);
    const auto& named = static_cast<const rdma::RdmaMemory&>(**memory);
    for (std::size_t rail = 0; rail < named.rail_count(); ++rail) {
      // There is a key for each byte.
      const auto& keys = named.rail(rail);
      KVZC_FUZZ_CHECK((nbytes - 1) / keys.part_bytes < keys.keys.size());
    }
    std::byte here{};
    (void)(*memory)->offset_of({&here, 1, nullptr, nullptr});
    return;
  }
  const std::unique_ptr<ChannelHalf> half = fuzz::Host::must(transport->open_channel());
  ChannelPeer peer;
  peer.kick = [](void*) { return false; };
  Blob blob;
  const fuzz::Bytes bytes = in.rest();
  blob.bytes.assign(bytes.begin(), bytes.end());
  const auto channel = half->join(std::move(blob), peer);
  if (!channel.is_ok()) return;
  (*channel)->drain();
  if ((*channel)->take_credit(1).is_ok()) (*channel)->send_tag(Tag{}, Code::kOk);
  (*channel)->lose(Status(Code::kClosed, "the end"), PeerFate::kUnknown);
  (void)(*channel)->cut_off(0);
}

}  // namespace kvzc
