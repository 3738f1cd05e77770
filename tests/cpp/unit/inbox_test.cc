#include "core/inbox.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/endpoint.h"
#include "unit/unit_support.h"

namespace kvzc {
namespace {

constexpr std::int64_t kTtl = 1000;

std::shared_ptr<const PeerInfo> make_peer(std::uint8_t number) {
  auto peer = std::make_shared<PeerInfo>();
  peer->incarnation[0] = std::byte{number};
  return peer;
}

// What an inbox does, by looking at everything each time.
class Model {
 public:
  struct Item {
    std::string tag;
    const PeerInfo* peer;
    std::int64_t arrived_ns;
  };

  void add(const PeerInfo* peer, const std::string& tag, std::int64_t now) {
    ++counts.arrived;
    if (forgotten_until_.contains(tag)) {
      ++counts.forgotten;
    } else {
      items.push_back({tag, peer, now});
    }
  }
  std::vector<Item> take(const std::string& tag, std::size_t count, const PeerInfo* peer) {
    const auto is_wanted = [&](const Item& item) {
      return item.tag == tag && (peer == nullptr || item.peer == peer);
    };
    if (static_cast<std::size_t>(std::count_if(items.begin(), items.end(), is_wanted)) < count) return {};
    std::vector<Item> out;
    std::erase_if(items, [&](const Item& item) {
      if (out.size() == count || !is_wanted(item)) return false;
      out.push_back(item);
      return true;
    });
    counts.taken += out.size();
    return out;
  }
  std::vector<Item> poll(std::size_t most) {
    std::vector<Item> out;
    std::erase_if(items, [&](const Item& item) {
      if (out.size() == most || waited_for.contains(item.tag)) return false;
      out.push_back(item);
      return true;
    });
    counts.taken += out.size();
    return out;
  }
  void forget(const std::string& tag, std::int64_t now) {
    forgotten_until_[tag] = now + kTtl;
    counts.forgotten += std::erase_if(items, [&](const Item& item) { return item.tag == tag; });
  }
  void expire(std::int64_t now) {
    counts.expired += std::erase_if(items, [&](const Item& item) {
      return item.arrived_ns + kTtl <= now && !waited_for.contains(item.tag);
    });
    std::erase_if(forgotten_until_, [now](const auto& each) { return each.second <= now; });
  }
  void begin_wait(const std::string& tag) {
    waited_for.insert(tag);
    forgotten_until_.erase(tag);
  }

  std::vector<Item> items;
  std::multiset<std::string> waited_for;
  Inbox::Counts counts;

 private:
  std::map<std::string, std::int64_t> forgotten_until_;
};

void expect_equal(const std::vector<Arrival>& got, const std::vector<Model::Item>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].tag, expected[i].tag);
    ASSERT_EQ(got[i].peer.get(), expected[i].peer);
    ASSERT_EQ(got[i].arrived_ns, expected[i].arrived_ns);
  }
}

TEST(Inbox, DoesWhatItsModelDoes) {
  test::Random random(21);
  KVZC_TRACE_SEED(random);
  // Short ones and ones that no string holds in place; more at once than are kept for reuse.
  const std::string tags[] = {"", "a", "b", std::string(200, 'c'), std::string(200, 'd')};
  const std::shared_ptr<const PeerInfo> peers[] = {make_peer(1), make_peer(2), make_peer(3)};
  for (int round = 0; round < 200; ++round) {
    Inbox inbox(kTtl);
    Model model;
    std::int64_t now = 1;
    for (int step = 0; step < 400; ++step) {
      Inbox::Credits credits;
      const std::string& tag = tags[random.between(0, 4)];
      const auto& peer = peers[random.between(0, 2)];
      const PeerInfo* const only = random.one_in(2) ? peer.get() : nullptr;
      const auto count = static_cast<std::size_t>(random.between(1, 3));
      now += random.between(0, 20);
      switch (random.between(0, 11)) {
        case 0:
          inbox.forget(tag, now, &credits);
          model.forget(tag, now);
          break;
        case 1:
          now += random.one_in(4) ? kTtl / 2 : 0;
          inbox.expire(now, &credits);
          model.expire(now);
          break;
        case 2:
          inbox.begin_wait(tag);
          model.begin_wait(tag);
          break;
        case 3:
          if (const auto at = model.waited_for.find(tag); at != model.waited_for.end()) {
            inbox.end_wait(tag);
            model.waited_for.erase(at);
          }
          break;
        case 4:
          ASSERT_NO_FATAL_FAILURE(expect_equal(inbox.poll(count, &credits), model.poll(count)));
          break;
        case 5:
        case 6:
          ASSERT_NO_FATAL_FAILURE(
              expect_equal(inbox.take(tag, count, only, &credits), model.take(tag, count, only)));
          break;
        default:
          inbox.add(peer, {}, tag, Code::kOk, now, &credits);
          model.add(peer.get(), tag, now);
      }
      ASSERT_EQ(inbox.has_pollable(),
                std::any_of(model.items.begin(), model.items.end(), [&](const Model::Item& item) {
                  return !model.waited_for.contains(item.tag);
                }));
    }
    const Inbox::Counts counts = inbox.counts();
    EXPECT_EQ(counts.pending, model.items.size());
    EXPECT_EQ(counts.arrived, model.counts.arrived);
    EXPECT_EQ(counts.taken, model.counts.taken);
    EXPECT_EQ(counts.expired, model.counts.expired);
    EXPECT_EQ(counts.forgotten, model.counts.forgotten);
  }
}

}  // namespace
}  // namespace kvzc
