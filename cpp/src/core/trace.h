// Trace: what transfers did when, as a file that Perfetto and chrome://tracing open.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "kvzc/status.h"

namespace kvzc {

// Thread: any. Several engines, of several processes too, may write into one file: each line is
// appended as a whole, and they share a clock.
class Trace {
 public:
  // Errors: kSystem with the file's name.
  static Result<std::unique_ptr<Trace>> open(const std::string& path, std::string_view engine_name);
  ~Trace() { flush(); }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  struct Event {
    std::string_view lane;   // "put to decode-1"
    std::string_view label;  // Empty: none.
    std::string_view transport;
    std::string_view error;  // Empty: it is done.
    std::uint64_t nbytes = 0;
    std::uint64_t runs = 0;
    std::int64_t submitted_ns = 0;
    std::int64_t posted_ns = 0;  // 0: never.
    std::int64_t done_ns = 0;
  };
  void add(const Event& event);
  void flush();

 private:
  Trace(OwnedFd file, int pid) : file_(std::move(file)), pid_(pid) {}
  void add_slice(int track, std::string_view name, std::int64_t begin_ns, std::int64_t end_ns,
                 const std::string& arguments) KVZC_REQUIRES(mutex_);
  // Gives a track of the lane on which nothing overlaps.
  int track_for(std::string_view lane, std::int64_t begin_ns, std::int64_t end_ns)
      KVZC_REQUIRES(mutex_);
  void flush_locked() KVZC_REQUIRES(mutex_);

  // Slices of one track must not overlap: a lane has as many as run at the same time.
  struct Track {
    int number;
    std::int64_t end_ns;
  };
  const OwnedFd file_;
  const int pid_;
  Mutex mutex_;  // Guards the rest.
  std::string buffer_ KVZC_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<Track>, std::less<>> lanes_ KVZC_GUARDED_BY(mutex_);
  int next_track_ KVZC_GUARDED_BY(mutex_) = 1;
};

}  // namespace kvzc
