// register_cost: what it costs to register memory, to give out a right to it and to take it back,
// while another process is connected; and what a put costs where much is registered.
//
// Floor of the put, measured in turns with it: the same put between two engines, in the same two
// processes, with one region each.

#include "cpp/harness.h"

namespace kvzc::bench {
namespace {

constexpr std::uint64_t kRegions = 10'000, kRegionBytes = 4 << 10, kPutBytes = 8, kSeed = 17;

// An engine with so many regions. The one in the middle is put to, or from.
class Owner {
 public:
  explicit Owner(std::uint64_t regions)
      : engine_(take(Engine::create({}))),
        memory_(*engine_, regions * kRegionBytes, MemoryKind::kPrivate),
        shared_(*engine_, kRegionBytes) {
    for (std::uint64_t i = 0; i + 1 < regions; ++i) {
      regions_.push_back(register_one(*engine_, memory_.spec_of(i * kRegionBytes, kRegionBytes)));
    }
    regions_.push_back(register_one(*engine_, shared_.spec()));
  }

  Engine& engine() { return *engine_; }
  const Memory& memory() const { return shared_; }
  const Region& region() const { return regions_.back(); }
  std::string text() const { return text_of(take(region().handle())); }

 private:
  const std::shared_ptr<Engine> engine_;
  const Memory memory_, shared_;
  std::vector<Region> regions_;
};

// The other process: owns what is put to, then connects to each handle that it is sent.
void live(int socket) {
  Owner few(1), many(kRegions);
  write_text(socket, few.text());
  write_text(socket, many.text());
  std::vector<RemoteView> views;
  for (bool is_next; read_all(socket, &is_next, sizeof is_next);) {
    views.push_back(open_handle(few.engine(), read_text(socket)));
    write_value(socket, true);
  }
}

}  // namespace

void register_cost(const Options& options, Report& report) {
  OtherProcess other(Cores::kOneEach, live);
  Owner few(1), many(kRegions);
  const auto has_connected = [&](const std::string& text) {
    write_value(other.socket(), true);
    write_text(other.socket(), text);
    (void)read_value<bool>(other.socket());
  };

  // A put whose source is found by its address.
  const auto put_from = [&](Owner& owner) {
    fill_random_bytes(owner.memory().data(), kRegionBytes, kSeed);
    return
        [&owner, spec = owner.memory().spec_of(0, kPutBytes),
         target = bytes_of(open_handle(owner.engine(), read_text(other.socket())), 0, kPutBytes)] {
          const LocalView source = owner.engine().find_or_borrow(spec).take();
          put_and_wait(owner.engine(), source, target);
        };
  };
  const Operation floor{put_from(few)}, put{put_from(many)};
  report.add("register_cost", "put 8 B, 10,000 regions", kPutBytes,
             measure(options.seconds_per_row, {put, floor}, 1000), times_floor(1.1));

  Engine& engine = few.engine();
  has_connected(few.text());
  const Memory large(engine, std::min<std::uint64_t>(options.most_bytes, 1u << 30));
  const TensorSpec spec = large.spec();
  Region region;
  report.add("register_cost", "register " + size_text(spec.storage_nbytes), 0,
             measure(options.seconds_per_row,
                     {{[&] { region = register_one(engine, spec); }, [] {},
                       [&] { check(region.close(INT64_MAX)); }}},
                     1),
             within_ns(100e3));

  region = register_one(engine, spec);
  has_connected(text_of(take(region.handle())));
  constexpr std::uint32_t kGrants = 100;
  const LocalView block = bytes_of(take(region.view()), kRegionBytes, kRegionBytes);
  std::vector<Grant> grants;
  const auto grant = [&] { grants.push_back(take(engine.grant(block, Access::kPut))); };
  const auto revoke = [&] {
    check(grants.back().revoke(INT64_MAX, Force::kNo));
    grants.pop_back();
  };
  const auto times = [](auto once) {
    return [once] {
      for (std::uint32_t i = 0; i < kGrants; ++i) once();
    };
  };
  report.add("register_cost", "grant", 0,
             measure(options.seconds_per_row, {{grant, [] {}, times(revoke)}}, kGrants),
             within_ns(5e3));
  report.add("register_cost", "revoke", 0,
             measure(options.seconds_per_row, {{revoke, times(grant)}}, kGrants), within_ns(10e3));
  report.add("register_cost", "revoke, the peer knows it", 0,
             measure(options.seconds_per_row,
                     {{revoke,
                       [&] {
                         grant();
                         has_connected(text_of(take(grants.back().handle())));
                       }}},
                     1),
             within_ns(10e3));
}

}  // namespace kvzc::bench
