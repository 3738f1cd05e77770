#include "base/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvzc {
namespace {

// Below this a streaming copy only costs: the lines it flushes are few.
constexpr std::size_t kLeastStreamingBytes = 2048;

#if defined(__x86_64__)

using Kernel = void (*)(std::byte*, const std::byte*, std::size_t);

// Both kernels: the target is aligned to a line, nbytes is a multiple of four lines.
__attribute__((target("avx512f"))) void stream_avx512(std::byte* target, const std::byte* source,
                                                      std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 256) {
    _mm_prefetch(reinterpret_cast<const char*>(source + i + 1024), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(source + i + 1088), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(source + i + 1152), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(source + i + 1216), _MM_HINT_T0);
    const __m512i a = _mm512_loadu_si512(source + i);
    const __m512i b = _mm512_loadu_si512(source + i + 64);
    const __m512i c = _mm512_loadu_si512(source + i + 128);
    const __m512i d = _mm512_loadu_si512(source + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i + 192), d);
  }
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* target, const std::byte* source,
                                                 std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(source + i + 1024), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(source + i + 1088), _MM_HINT_T0);
    const auto* in = reinterpret_cast<const __m256i*>(source + i);
    auto* out = reinterpret_cast<__m256i*>(target + i);
    const __m256i a = _mm256_loadu_si256(in);
    const __m256i b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2);
    const __m256i d = _mm256_loadu_si256(in + 3);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c);
    _mm256_stream_si256(out + 3, d);
  }
}

struct Choice {
  Kernel kernel;
  const char* name;
};

const Choice& choice() {
  static const Choice chosen = [] {
    if (__builtin_cpu_supports("avx512f")) return Choice{stream_avx512, "avx512"};
    if (__builtin_cpu_supports("avx2")) return Choice{stream_avx2, "avx2"};
    return Choice{nullptr, "memcpy"};
  }();
  return chosen;
}

#endif

}  // namespace

void copy_bytes(std::byte* target, const std::byte* source, std::size_t nbytes, bool streaming) {
#if defined(__x86_64__)
  if (streaming && nbytes >= kLeastStreamingBytes && choice().kernel != nullptr) {
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(target) % 64) % 64;
    std::memcpy(target, source, head);
    const std::size_t body = (nbytes - head) / 256 * 256;
    choice().kernel(target + head, source + head, body);
    std::memcpy(target + head + body, source + head + body, nbytes - head - body);
    return;
  }
#endif
  (void)streaming;
  std::memcpy(target, source, nbytes);
}

void copy_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

const char* copy_kernel() {
#if defined(__x86_64__)
  return choice().name;
#else
  return "memcpy";
#endif
}

}  // namespace kvzc
