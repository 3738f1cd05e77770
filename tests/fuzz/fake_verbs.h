// RDMA devices that are not there: they take what is posted and give back what they are told to, so
// that a fuzzer can be the peer. No byte moves but those of messages.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvzc::fuzz {

inline constexpr std::size_t kDevices = 2;

// Queue pairs are known by the order in which they were made, from 0, since the last forget_pairs().
// Those that are gone, or were never there, do nothing.
void forget_pairs();
// A message comes in, where a receive is posted.
void deliver(std::size_t pair, std::span<const std::byte> message);
// The first `count` requests that were posted come back: as done, or as failed, which breaks the pair.
void give_back(std::size_t pair, std::size_t count, bool is_ok);
// The port of this device goes down.
void take_port_down(std::size_t device);
// So many requests the devices take before they refuse one; negative: all.
void refuse_after(int requests);

}  // namespace kvzc::fuzz
