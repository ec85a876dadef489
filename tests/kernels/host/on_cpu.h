// What sums.cu needs on a CPU: one thread stands in for a block, 16 bytes are moved by SSE, and a kernel that stops throws.
// With it at the top, g++ makes a library whose functions run a kernel's blocks as threads and say whether it stopped.
#define ON_CPU
#include <emmintrin.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <chrono>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
using std::max;
using std::min;
struct uint2 { unsigned x, y; };
struct Place { int x; };
static thread_local Place blockIdx, gridDim, blockDim{1}, threadIdx{0};
struct Line;
struct Stopped {};
#define BARRIER() std::atomic_thread_fence(std::memory_order_seq_cst)
#define FENCE() std::atomic_thread_fence(std::memory_order_seq_cst)
#define STOP() throw Stopped()
static inline unsigned long long now() { std::this_thread::yield(); return std::chrono::steady_clock::now().time_since_epoch().count(); }
// A rank that is set aside before every look at what another one has written, in microseconds.
static int aside = 0;
static inline void look() { if (aside) std::this_thread::sleep_for(std::chrono::microseconds(aside)); }
template <class L> static inline L load_line_of(const void* at) {
  L v;
  look();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  _mm_storeu_si128((__m128i*)&v, _mm_load_si128((const __m128i*)at));
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return v;
}
#define load_line(at) load_line_of<Line>(at)
#define store_line(at, ...) (store_line_of(at, __VA_ARGS__))
// A GPU moves each half of a line by itself, and a rank may be set aside between them; here it is in every 64th line.
template <class L> static inline void store_line_of(void* at, L v) {
  unsigned long long half[2];
  memcpy(half, &v, 16);
  auto to = (std::atomic<unsigned long long>*)at;
  to[0].store(half[0], std::memory_order_release);
  if (((unsigned long long)at & 0x3ff) == 0) look();
  to[1].store(half[1], std::memory_order_release);
}
static inline unsigned load_word(const void* at) { look(); return ((const std::atomic<unsigned>*)at)->load(std::memory_order_relaxed); }
static inline void store_word(void* at, unsigned v) { ((std::atomic<unsigned>*)at)->store(v, std::memory_order_relaxed); }
static inline unsigned long long load_pair(const void* at) { look(); return ((const std::atomic<unsigned long long>*)at)->load(std::memory_order_relaxed); }
static inline void store_pair(void* at, unsigned long long v) { ((std::atomic<unsigned long long>*)at)->store(v, std::memory_order_relaxed); }
static inline unsigned load_flag(const void* at) { look(); return ((const std::atomic<unsigned>*)at)->load(std::memory_order_acquire); }
static inline void store_flag(void* at, unsigned v) { ((std::atomic<unsigned>*)at)->store(v, std::memory_order_release); }
static inline unsigned bits_of(float v) { unsigned b; memcpy(&b, &v, 4); return b; }
static inline float float_of(unsigned b) { float v; memcpy(&v, &b, 4); return v; }
#define LANES 1
#define GROUPS 16384  // for three blocks
#define SHARED static thread_local
#define OF_LANE(v, step) (v)
#define TIMES(a, b) ((a) * (b))
#define PLUS(a, b) ((a) + (b))
#define BITS(v) bits_of(v)
#define FLOAT(v) float_of(v)
static inline float from_half(unsigned b) { unsigned short s = b; _Float16 h; memcpy(&h, &s, 2); return (float)h; }
static inline unsigned to_half(float v) { _Float16 h = (_Float16)v; unsigned short s; memcpy(&s, &h, 2); return s; }

// Run a kernel with `grid` blocks; 1 if one of them stopped.
template <class F> static int run(int grid, F kernel) {
  std::atomic<int> stopped{0};
  std::vector<std::thread> threads;
  for (int block = 0; block < grid; block++)
    threads.emplace_back([&, block] {
      blockIdx.x = block;
      gridDim.x = grid;
      try { kernel(); } catch (Stopped) { stopped = 1; }
    });
  for (auto& thread : threads) thread.join();
  return stopped;
}
