#include "core/inbox.h"

#include <algorithm>

#include "core/endpoint.h"

namespace kvzc {

void Inbox::Credits::add(const Origin& origin) {
  for (auto& [known, count] : counts_) {
    if (known.transport == origin.transport && !known.endpoint.owner_before(origin.endpoint) &&
        !origin.endpoint.owner_before(known.endpoint)) {
      ++count;
      return;
    }
  }
  counts_.emplace_back(origin, 1);
}

void Inbox::Credits::settle() {
  for (auto& [origin, count] : counts_) {
    if (const std::shared_ptr<Endpoint> alive = origin.endpoint.lock()) {
      alive->grant_credits(origin.transport, count);
    }
  }
  counts_.clear();
}

void Inbox::add(std::shared_ptr<const PeerInfo> peer, Origin origin, std::string_view tag,
                Code code, std::int64_t now, Credits* credits) {
  std::lock_guard lock(mutex_);
  ++counts_.arrived;
  Item item{std::string(tag), std::move(peer), std::move(origin), code, now};
  if (!forgotten_until_.empty() && forgotten_until_.contains(item.tag)) {
    ++counts_.forgotten;
    credits->add(item.origin);
    return;
  }
  order_.push_back(std::move(item));
  by_tag_[order_.back().tag].push_back(std::prev(order_.end()));
}

Arrival Inbox::remove(Order::iterator item, Credits* credits) {
  Arrival out{item->tag, item->peer, item->code, item->arrived_ns};
  const auto found = by_tag_.find(item->tag);
  auto& same_tag = found->second;
  // Nearly always the first: the oldest of its tag goes first.
  same_tag.erase(std::find(same_tag.begin(), same_tag.end(), item));
  if (same_tag.empty()) by_tag_.erase(found);
  credits->add(item->origin);
  order_.erase(item);
  return out;
}

std::vector<Arrival> Inbox::take(std::string_view tag, std::size_t count, const PeerInfo* peer,
                                 Credits* credits) {
  std::lock_guard lock(mutex_);
  const auto found = by_tag_.find(std::string(tag));
  if (found == by_tag_.end() || found->second.size() < count) return {};
  std::vector<Order::iterator> chosen;
  for (const Order::iterator item : found->second) {
    if (peer != nullptr && item->peer->incarnation != peer->incarnation) continue;
    chosen.push_back(item);
    if (chosen.size() == count) break;
  }
  if (chosen.size() < count) return {};
  std::vector<Arrival> out;
  out.reserve(count);
  for (const Order::iterator item : chosen) out.push_back(remove(item, credits));
  counts_.taken += count;
  return out;
}

std::vector<Arrival> Inbox::poll(std::size_t most, Credits* credits) {
  std::lock_guard lock(mutex_);
  std::vector<Arrival> out;
  for (auto at = order_.begin(); at != order_.end() && out.size() < most;) {
    const auto item = at++;
    if (!waited_for_.empty() && waited_for_.contains(item->tag)) continue;
    out.push_back(remove(item, credits));
  }
  counts_.taken += out.size();
  return out;
}

bool Inbox::has_pollable() {
  std::lock_guard lock(mutex_);
  if (waited_for_.empty()) return !order_.empty();
  return std::any_of(order_.begin(), order_.end(),
                     [&](const Item& item) { return !waited_for_.contains(item.tag); });
}

void Inbox::forget(std::string_view tag, std::int64_t now, Credits* credits) {
  std::lock_guard lock(mutex_);
  const std::string key(tag);
  // Later ones are dropped for as long as they would have been kept.
  forgotten_until_[key] = now + ttl_ns_;
  const auto found = by_tag_.find(key);
  if (found == by_tag_.end()) return;
  const std::deque<Order::iterator> items = found->second;
  for (const Order::iterator item : items) remove(item, credits);
  counts_.forgotten += items.size();
}

void Inbox::expire(std::int64_t now, Credits* credits) {
  std::lock_guard lock(mutex_);
  for (auto at = order_.begin(); at != order_.end() && at->arrived_ns + ttl_ns_ <= now;) {
    const auto item = at++;
    if (waited_for_.contains(item->tag)) continue;
    remove(item, credits);
    ++counts_.expired;
  }
  std::erase_if(forgotten_until_, [now](const auto& entry) { return entry.second <= now; });
}

void Inbox::begin_wait(std::string_view tag) {
  std::lock_guard lock(mutex_);
  ++waited_for_[std::string(tag)];
  // Whoever waits for a tag no longer wants it forgotten.
  forgotten_until_.erase(std::string(tag));
}

void Inbox::end_wait(std::string_view tag) {
  std::lock_guard lock(mutex_);
  const auto found = waited_for_.find(std::string(tag));
  if (found != waited_for_.end() && --found->second == 0) waited_for_.erase(found);
}

Inbox::Counts Inbox::counts() {
  std::lock_guard lock(mutex_);
  Counts out = counts_;
  out.pending = order_.size();
  return out;
}

}  // namespace kvzc
