#include "core/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace kvzc {
namespace {

constexpr std::size_t kBufferBytes = 64 << 10;

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// The format counts in microseconds.
std::string microseconds(std::int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03d", static_cast<long long>(ns / 1000),
                static_cast<int>(ns % 1000));
  return text;
}

std::string size_words(std::uint64_t nbytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  auto size = static_cast<double>(nbytes);
  for (; size >= 1024 && unit + 1 < std::size(kUnits); size /= 1024) ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", size, kUnits[unit]);
  return text;
}

Status not_written(const std::string& path) {
  const int error = errno;
  return Status::system(error, "opening the trace file '" + path + "'");
}

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // A full disk costs the trace, not the transfers.
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace

Result<std::unique_ptr<Trace>> Trace::open(const std::string& path, std::string_view engine_name) {
  // Not waiting for who reads a pipe.
  OwnedFd file(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644));
  struct stat what {};
  // Whoever is first opens the array; readers do not ask that it be closed.
  if (!file.is_valid() || flock(file.get(), LOCK_EX) != 0 || fstat(file.get(), &what) != 0) {
    return not_written(path);
  }
  if (what.st_size == 0) write_all(file.get(), "[\n");
  flock(file.get(), LOCK_UN);
  std::unique_ptr<Trace> out(new Trace(std::move(file), getpid()));
  const std::string name = "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":" + std::to_string(out->pid_) +
                 ",\"args\":{\"name\":" + quoted("kvzc " + std::string(engine_name)) + "}},\n";
  write_all(out->file_.get(), name);
  return out;
}

void Trace::add(const Event& event) {
  std::string arguments = "\"bytes\":" + std::to_string(event.nbytes) +
                          ",\"runs\":" + std::to_string(event.runs) +
                          ",\"transport\":" + quoted(event.transport);
  if (!event.label.empty()) arguments += ",\"label\":" + quoted(event.label);
  if (!event.error.empty()) arguments += ",\"error\":" + quoted(event.error);
  const std::string name =
      (event.error.empty() ? "" : std::string(event.error) + ": ") +
      (event.label.empty() ? size_words(event.nbytes) : std::string(event.label));
  const MutexLock lock(mutex_);
  const int track = track_for(event.lane, event.submitted_ns, event.done_ns);
  add_slice(track, name, event.submitted_ns, event.done_ns, arguments);
  const std::int64_t posted = event.posted_ns == 0 ? event.done_ns : event.posted_ns;
  if (posted > event.submitted_ns) add_slice(track, "queue", event.submitted_ns, posted, "");
  if (posted < event.done_ns) add_slice(track, "copy", posted, event.done_ns, "");
  if (buffer_.size() >= kBufferBytes) flush_locked();
}

int Trace::track_for(std::string_view lane, std::int64_t begin_ns, std::int64_t end_ns) {
  auto found = lanes_.find(lane);
  if (found == lanes_.end()) found = lanes_.emplace(std::string(lane), std::vector<Track>()).first;
  std::vector<Track>& tracks = found->second;
  auto free = std::find_if(tracks.begin(), tracks.end(),
                           [&](const Track& track) { return track.end_ns <= begin_ns; });
  if (free == tracks.end()) {
    tracks.push_back({next_track_++, 0});
    free = std::prev(tracks.end());
    std::string name(lane);
    if (tracks.size() > 1) name += " (" + std::to_string(tracks.size()) + ")";
    buffer_ += "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":" + std::to_string(pid_) +
               ",\"tid\":" + std::to_string(free->number) + ",\"args\":{\"name\":" + quoted(name) +
               "}},\n";
  }
  free->end_ns = end_ns;
  return free->number;
}

void Trace::add_slice(int track, std::string_view name, std::int64_t begin_ns, std::int64_t end_ns,
                      const std::string& arguments) {
  buffer_ += "{\"ph\":\"X\",\"cat\":\"kvzc\",\"name\":" + quoted(name) +
             ",\"pid\":" + std::to_string(pid_) + ",\"tid\":" + std::to_string(track) +
             ",\"ts\":" + microseconds(begin_ns) + ",\"dur\":" + microseconds(end_ns - begin_ns) +
             (arguments.empty() ? "" : ",\"args\":{" + arguments + "}") + "},\n";
}

void Trace::flush() {
  const MutexLock lock(mutex_);
  flush_locked();
}

void Trace::flush_locked() {
  write_all(file_.get(), buffer_);
  buffer_.clear();
}

}  // namespace kvzc
