#include "base/gated_copy.h"

#include "base/copy.h"

// Sanitizers do not see what assembly reads and writes: their builds take the portable way.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVZC_GATED_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define KVZC_GATED_SANITIZED 1
#endif
#endif

#if defined(__x86_64__) && defined(__LP64__) && defined(__linux__) && !defined(KVZC_GATED_SANITIZED)
#define KVZC_GATED_RESTARTS 1
#include <cpuid.h>
#include <dlfcn.h>
#endif

namespace kvzc {
namespace {

__attribute__((noinline)) bool copy_portably(std::byte* target, const std::byte* source,
                                             std::size_t nbytes, bool streaming,
                                             const CopyGate& gate) {
  if (!is_open(gate)) return false;
  copy_bytes(target, source, nbytes, streaming);
  return true;
}

#if defined(KVZC_GATED_RESTARTS)

// ---- Restartable sequences ----
//
// A stretch of code in which the kernel does not let a thread go on after it was preempted,
// migrated or signalled there: on its way back to user mode it is put at the sequence's abort
// address, with all other registers as they were. A thread is in one while its word rseq_cs points
// to a descriptor and its instruction pointer is between the bounds named there.

// The head of struct rseq in <linux/rseq.h>, a header that old systems lack.
struct Rseq {
  std::uint32_t cpu_id_start;
  std::uint32_t cpu_id;  // Negative as a signed number: this thread is not registered.
  std::uint64_t rseq_cs;
};

// Gives the distance from a thread's pointer to its struct rseq; 0 where it has none. Looked up by
// name, because linking to it would make glibc 2.35 the least that loads this library.
std::ptrdiff_t find_rseq() {
  const auto* offset = static_cast<const std::ptrdiff_t*>(dlsym(RTLD_DEFAULT, "__rseq_offset"));
  const auto* size = static_cast<const unsigned*>(dlsym(RTLD_DEFAULT, "__rseq_size"));
  // The size is 0 where the kernel refused, or the user (GLIBC_TUNABLES=glibc.pthread.rseq=0).
  if (offset == nullptr || size == nullptr || *size == 0) return 0;
  return *offset;
}

// Not a static of the function below, whose look at its guard small copies would feel. A copy
// before it is initialised finds 0 and takes the portable way.
const std::ptrdiff_t rseq_offset = find_rseq();

// Gives this thread's struct rseq, null unless it is registered.
inline Rseq* own_rseq() {
  if (rseq_offset == 0) return nullptr;
  std::byte* thread_pointer;
  asm("movq %%fs:0, %0" : "=r"(thread_pointer));
  auto* rseq = reinterpret_cast<Rseq*>(thread_pointer + rseq_offset);
  // The kernel writes it.
  const auto cpu_id = *const_cast<const volatile std::uint32_t*>(&rseq->cpu_id);
  return static_cast<std::int32_t>(cpu_id) >= 0 ? rseq : nullptr;
}

// Begins a sequence. 3 is its descriptor, struct rseq_cs: version, flags, begin, length, abort
// address. 0, which arms it, is the abort address too: an aborted copy begins again, and looks at
// the gate again. The four bytes in front of 0 must be the signature that glibc registered; they
// are the operand of an instruction that traps if ever executed. 1 is the first instruction inside.
// Plain loads will do there: the caller's read-modify-write and a switch of threads are both full
// barriers on x86.
#define KVZC_BEGIN_SEQUENCE           \
  ".pushsection __rseq_cs, \"aw\"\n"  \
  ".balign 32\n"                      \
  "3: .long 0, 0\n"                   \
  ".quad 1f, 2f - 1f, 0f\n"           \
  ".popsection\n"                     \
  "jmp 0f\n"                          \
  ".byte 0x0f, 0xb9, 0x3d\n"          \
  ".long 0x53053053\n"                \
  "0: leaq 3b(%%rip), %[scratch]\n"   \
  "movq %[scratch], %[rseq_cs]\n"     \
  "1: cmpq %[expected], (%[epoch])\n" \
  "jne 2f\n"                          \
  "cmpl $0, (%[is_cut])\n"            \
  "jne 2f\n"

// Ends it: 2 is the first instruction outside. It disarms, because the kernel must not find a
// descriptor of a library that was unloaded.
#define KVZC_END_SEQUENCE "2: movq $0, %[rseq_cs]\n"

#define KVZC_GATE_OPERANDS \
  [epoch] "r"(gate.epoch), [expected] "r"(gate.expected_epoch), [is_cut] "r"(gate.is_cut)

// ---- Kernels ----
//
// Each gives false if it found the gate shut before the end. How far the copy is stands in
// registers and is right at every instruction; nothing inside calls a function or enters the
// kernel.
using Kernel = bool (*)(Rseq&, std::byte*, const std::byte*, std::size_t, const CopyGate&);

// Defines a kernel for at least `step` bytes. i counts up from -nbytes to 0 and is added to the
// ends of both sides. `copy` copies the `step` bytes at i; then one instruction moves i on, so that
// an abort costs at most one step, done twice. If nbytes is no multiple of `step`, the last step
// overlaps the one before. `after` comes behind the sequence.
// clang-format off
#define KVZC_DEFINE_KERNEL(name, step, copy, after)                                                \
  bool name(Rseq& rseq, std::byte* target, const std::byte* source, std::size_t nbytes,            \
            const CopyGate& gate) {                                                                \
    auto i = -static_cast<std::ptrdiff_t>(nbytes);                                                 \
    std::uint64_t scratch;                                                                         \
    asm volatile(KVZC_BEGIN_SEQUENCE                                                               \
                 "jmp 5f\n"                                                                        \
                 ".balign 16\n"                                                                    \
                 "4:\n" copy                                                                       \
                 "addq $" #step ", %[i]\n"                                                         \
                 "5: cmpq $-" #step ", %[i]\n"                                                     \
                 "jle 4b\n"                                                                        \
                 "testq %[i], %[i]\n"                                                              \
                 "je 2f\n"                                                                         \
                 "movq $-" #step ", %[i]\n"                                                        \
                 "jmp 4b\n"                                                                        \
                 KVZC_END_SEQUENCE after                                                           \
                 : [i] "+&r"(i), [scratch] "=&r"(scratch), [rseq_cs] "=m"(rseq.rseq_cs)            \
                 : [target] "r"(target + nbytes), [source] "r"(source + nbytes),                   \
                   KVZC_GATE_OPERANDS                                                              \
                 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", \
                   "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");          \
    return i == 0;                                                                                 \
  }

// One step of one register, and of four.
#define KVZC_COPY(move, reg)          \
  move " (%[source],%[i]), " reg "\n" \
  move " " reg ", (%[target],%[i])\n"
#define KVZC_COPY_4(load, store, reg, width)        \
  load " 0*" width "(%[source],%[i]), %%" reg "0\n"  \
  load " 1*" width "(%[source],%[i]), %%" reg "1\n"  \
  load " 2*" width "(%[source],%[i]), %%" reg "2\n"  \
  load " 3*" width "(%[source],%[i]), %%" reg "3\n"  \
  store " %%" reg "0, 0*" width "(%[target],%[i])\n" \
  store " %%" reg "1, 1*" width "(%[target],%[i])\n" \
  store " %%" reg "2, 2*" width "(%[target],%[i])\n" \
  store " %%" reg "3, 3*" width "(%[target],%[i])\n"
// clang-format on
#define KVZC_PREFETCH(distance) "prefetcht0 " distance "(%[source],%[i])\n"

// The compiler does not know that assembly dirtied the upper halves of its registers.
#define KVZC_CLEAN_UPPERS "vzeroupper\n"

KVZC_DEFINE_KERNEL(copy_1, 1, KVZC_COPY("movb", "%b[scratch]"), "")
KVZC_DEFINE_KERNEL(copy_4, 4, KVZC_COPY("movl", "%k[scratch]"), "")
KVZC_DEFINE_KERNEL(copy_8, 8, KVZC_COPY("movq", "%[scratch]"), "")
KVZC_DEFINE_KERNEL(copy_16, 16, KVZC_COPY("movups", "%%xmm0"), "")
KVZC_DEFINE_KERNEL(copy_sse, 64, KVZC_COPY_4("movups", "movups", "xmm", "16"), "")
KVZC_DEFINE_KERNEL(copy_avx, 128, KVZC_COPY_4("vmovdqu", "vmovdqu", "ymm", "32"), KVZC_CLEAN_UPPERS)
KVZC_DEFINE_KERNEL(copy_avx512, 256, KVZC_COPY_4("vmovdqu64", "vmovdqu64", "zmm", "64"),
                   KVZC_CLEAN_UPPERS)

// The streaming kernels of copy.cc: the target is aligned to a line, nbytes is a multiple of 256.
KVZC_DEFINE_KERNEL(stream_avx2, 128,
                   KVZC_PREFETCH("1024") KVZC_PREFETCH("1088")
                       KVZC_COPY_4("vmovdqu", "vmovntdq", "ymm", "32"),
                   KVZC_CLEAN_UPPERS)
KVZC_DEFINE_KERNEL(stream_avx512, 256,
                   KVZC_PREFETCH("1024") KVZC_PREFETCH("1088") KVZC_PREFETCH("1152")
                       KVZC_PREFETCH("1216") KVZC_COPY_4("vmovdqu64", "vmovntdq", "zmm", "64"),
                   KVZC_CLEAN_UPPERS)

// Where the processor has it fast, its own copy is what memcpy uses for large pieces. An interrupt
// in the middle of it leaves in its registers what is left to do.
bool copy_rep(Rseq& rseq, std::byte* target, const std::byte* source, std::size_t nbytes,
              const CopyGate& gate) {
  std::uint64_t scratch;
  asm volatile(KVZC_BEGIN_SEQUENCE "rep movsb\n" KVZC_END_SEQUENCE
               : "+&D"(target), "+&S"(source),
                 "+&c"(nbytes), [scratch] "=&r"(scratch), [rseq_cs] "=m"(rseq.rseq_cs)
               : KVZC_GATE_OPERANDS
               : "memory", "cc");
  return nbytes == 0;
}

// ---- Choice of kernels ----

// As in copy.cc.
constexpr std::size_t kLeastStreamingBytes = 2048;
// Below this `rep movsb` takes longer to begin than it saves.
constexpr std::size_t kLeastRepBytes = 4096;

struct Choice {
  Kernel wide;  // From least_wide bytes.
  std::size_t least_wide;
  Kernel large;   // From kLeastRepBytes.
  Kernel stream;  // Null: none.
};

const Choice& choice() {
  static const Choice chosen = [] {
    Choice best{copy_sse, 64, copy_sse, nullptr};
    if (__builtin_cpu_supports("avx512f")) {
      best = {copy_avx512, 256, copy_avx512, stream_avx512};
    } else if (__builtin_cpu_supports("avx2")) {
      best = {copy_avx, 128, copy_avx, stream_avx2};
    }
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    constexpr unsigned kErms = 1u << 9;  // Enhanced rep movsb.
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kErms) != 0) best.large = copy_rep;
    return best;
  }();
  return chosen;
}

bool copy_ordinary(Rseq& rseq, std::byte* target, const std::byte* source, std::size_t nbytes,
                   const CopyGate& gate) {
  if (nbytes < 16) {
    if (nbytes >= 8) return copy_8(rseq, target, source, nbytes, gate);
    if (nbytes >= 4) return copy_4(rseq, target, source, nbytes, gate);
    if (nbytes >= 1) return copy_1(rseq, target, source, nbytes, gate);
    return is_open(gate);
  }
  if (nbytes < 64) return copy_16(rseq, target, source, nbytes, gate);
  const Choice& chosen = choice();
  if (nbytes < chosen.least_wide) return copy_sse(rseq, target, source, nbytes, gate);
  const Kernel kernel = nbytes < kLeastRepBytes ? chosen.wide : chosen.large;
  return kernel(rseq, target, source, nbytes, gate);
}

// Out of line, as is copy_portably(): saving the registers they need would burden small copies.
__attribute__((noinline)) bool copy_streaming(Rseq& rseq, std::byte* target,
                                              const std::byte* source, std::size_t nbytes,
                                              const CopyGate& gate) {
  const Kernel stream = choice().stream;
  if (stream == nullptr) return copy_ordinary(rseq, target, source, nbytes, gate);
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(target) % 64) % 64;
  const std::size_t body = (nbytes - head) / 256 * 256;
  const std::size_t tail = nbytes - head - body;
  return copy_ordinary(rseq, target, source, head, gate) &&
         stream(rseq, target + head, source + head, body, gate) &&
         copy_ordinary(rseq, target + head + body, source + head + body, tail, gate);
}

#endif

}  // namespace

bool gated_copy(std::byte* target, const std::byte* source, std::size_t nbytes, bool streaming,
                const CopyGate& gate) {
#if defined(KVZC_GATED_RESTARTS)
  if (Rseq* rseq = own_rseq(); rseq != nullptr) {
    if (streaming && nbytes >= kLeastStreamingBytes) {
      return copy_streaming(*rseq, target, source, nbytes, gate);
    }
    return copy_ordinary(*rseq, target, source, nbytes, gate);
  }
#endif
  return copy_portably(target, source, nbytes, streaming, gate);
}

bool can_restart() {
#if defined(KVZC_GATED_RESTARTS)
  return own_rseq() != nullptr;
#else
  return false;
#endif
}

}  // namespace kvzc
