#include "core/inbox.h"

#include <algorithm>
#include <utility>

#include "core/endpoint.h"

namespace kvzc {

namespace {

constexpr std::size_t kMostSpare = 64;

}  // namespace

Inbox::Inbox(std::int64_t ttl_ns) : ttl_ns_(ttl_ns) { spare_nodes_.reserve(kMostSpare); }

void Inbox::Credits::add(Origin origin) {
  const auto is_same = [&origin](const Origin& known) {
    return known.transport == origin.transport && !known.endpoint.owner_before(origin.endpoint) &&
           !origin.endpoint.owner_before(known.endpoint);
  };
  if (first_.second == 0) {
    first_ = {std::move(origin), 1};
    return;
  }
  if (is_same(first_.first)) {
    ++first_.second;
    return;
  }
  for (Count& each : others_) {
    if (!is_same(each.first)) continue;
    ++each.second;
    return;
  }
  others_.emplace_back(std::move(origin), 1);
}

void Inbox::Credits::settle() {
  const auto give = [](const Count& each) {
    if (const std::shared_ptr<Endpoint> alive = each.first.endpoint.lock()) {
      alive->grant_credits(each.first.transport, each.second);
    }
  };
  if (is_empty()) return;
  give(first_);
  for (const Count& each : others_) give(each);
  first_ = {{}, 0};
  others_.clear();
}

Inbox::Same& Inbox::same_as(std::string_view tag) {
  if (const auto found = by_tag_.find(tag); found != by_tag_.end()) return found->second;
  if (spare_nodes_.empty()) return by_tag_[std::string(tag)];
  auto node = std::move(spare_nodes_.back());
  spare_nodes_.pop_back();
  node.key().assign(tag);
  node.mapped() = {};
  return by_tag_.insert(std::move(node)).position->second;
}

void Inbox::add(std::shared_ptr<const PeerInfo> peer, Origin origin, std::string_view tag,
                Code code, std::int64_t now, Credits* credits) {
  const MutexLock lock(mutex_);
  ++counts_.arrived;
  if (!forgotten_until_.empty() && forgotten_until_.contains(tag)) {
    ++counts_.forgotten;
    credits->add(std::move(origin));
    return;
  }
  if (spare_.empty()) spare_.emplace_back();
  Item& item = spare_.front();
  item.tag.assign(tag);
  Same& same = same_as(tag);  // The last that may throw.
  item.peer = std::move(peer);
  item.origin = std::move(origin);
  item.code = code;
  item.arrived_ns = now;
  item.next_of_tag = nullptr;
  item.self = spare_.begin();
  order_.splice(order_.end(), spare_, spare_.begin());
  (same.first == nullptr ? same.first : same.last->next_of_tag) = &item;
  same.last = &item;
  ++same.count;
}

Arrival Inbox::remove(Item& item, Credits* credits) {
  credits->add(std::move(item.origin));  // First: the last that may throw.
  const auto found = by_tag_.find(item.tag);
  Same& same = found->second;
  if (--same.count == 0) {
    if (spare_nodes_.size() < kMostSpare) {
      spare_nodes_.push_back(by_tag_.extract(found));
    } else {
      by_tag_.erase(found);
    }
  } else if (same.first == &item) {
    same.first = item.next_of_tag;
  } else {
    // Seldom: the oldest of its tag goes first, but for those of a certain peer.
    Item* before = same.first;
    while (before->next_of_tag != &item) before = before->next_of_tag;
    before->next_of_tag = item.next_of_tag;
    if (same.last == &item) same.last = before;
  }
  Arrival out{std::move(item.tag), std::move(item.peer), item.code, item.arrived_ns};
  if (spare_.size() < kMostSpare) {
    spare_.splice(spare_.begin(), order_, item.self);
  } else {
    order_.erase(item.self);
  }
  return out;
}

std::vector<Arrival> Inbox::take(std::string_view tag, std::size_t count, const PeerInfo* peer,
                                 Credits* credits) {
  const MutexLock lock(mutex_);
  const auto found = by_tag_.find(tag);
  if (found == by_tag_.end() || found->second.count < count) return {};
  Item* const first = found->second.first;
  const auto is_wanted = [peer](const Item& item) {
    return peer == nullptr || item.peer->incarnation == peer->incarnation;
  };
  std::size_t there = 0;
  for (const Item* item = first; item != nullptr && there < count; item = item->next_of_tag) {
    if (is_wanted(*item)) ++there;
  }
  if (there < count) return {};
  std::vector<Arrival> out;
  out.reserve(count);
  for (Item* item = first; out.size() < count;) {
    Item& each = *std::exchange(item, item->next_of_tag);
    if (is_wanted(each)) out.push_back(remove(each, credits));
  }
  counts_.taken += count;
  return out;
}

std::vector<Arrival> Inbox::poll(std::size_t most, Credits* credits) {
  const MutexLock lock(mutex_);
  std::vector<Arrival> out;
  for (auto at = order_.begin(); at != order_.end() && out.size() < most;) {
    Item& item = *at++;
    if (!waited_for_.empty() && waited_for_.contains(item.tag)) continue;
    out.push_back(remove(item, credits));
  }
  counts_.taken += out.size();
  return out;
}

bool Inbox::has_pollable() {
  const MutexLock lock(mutex_);
  if (waited_for_.empty()) return !order_.empty();
  return std::any_of(order_.begin(), order_.end(),
                     [&](const Item& item) KVZC_REQUIRES(mutex_) { return !waited_for_.contains(item.tag); });
}

void Inbox::forget(std::string_view tag, std::int64_t now, Credits* credits) {
  const MutexLock lock(mutex_);
  // Later ones are dropped for as long as they would have been kept.
  forgotten_until_[std::string(tag)] = now + ttl_ns_;
  const auto found = by_tag_.find(tag);
  if (found == by_tag_.end()) return;
  counts_.forgotten += found->second.count;
  for (Item* item = found->second.first; item != nullptr;) {
    (void)remove(*std::exchange(item, item->next_of_tag), credits);
  }
}

void Inbox::expire(std::int64_t now, Credits* credits) {
  const MutexLock lock(mutex_);
  for (auto at = order_.begin(); at != order_.end() && at->arrived_ns + ttl_ns_ <= now;) {
    Item& item = *at++;
    if (waited_for_.contains(item.tag)) continue;
    (void)remove(item, credits);
    ++counts_.expired;
  }
  std::erase_if(forgotten_until_, [now](const auto& entry) { return entry.second <= now; });
}

void Inbox::begin_wait(std::string_view tag) {
  const MutexLock lock(mutex_);
  if (const auto known = waited_for_.find(tag); known != waited_for_.end()) {
    ++known->second;
  } else {
    waited_for_.emplace(tag, 1u);
  }
  // Whoever waits for a tag no longer wants it forgotten.
  if (const auto found = forgotten_until_.find(tag); found != forgotten_until_.end()) {
    forgotten_until_.erase(found);
  }
}

void Inbox::end_wait(std::string_view tag) {
  const MutexLock lock(mutex_);
  const auto found = waited_for_.find(tag);
  if (found != waited_for_.end() && --found->second == 0) waited_for_.erase(found);
}

Inbox::Counts Inbox::counts() {
  const MutexLock lock(mutex_);
  Counts out = counts_;
  out.pending = order_.size();
  return out;
}

}  // namespace kvzc
