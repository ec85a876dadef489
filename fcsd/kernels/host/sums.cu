// Sums over the ranks of one host through memory that all of its GPUs have mapped: the host's, or for the kernels `one_shot`
// and `in_blocks` each other's, too. See layout.py for how it is used and for why no value is torn, stale or overwritten.
//
// RANKS, KIND (0 bf16, 1 fp16, 2 fp32) and GROUPS (see layout.py) are given when it is compiled: by NVRTC for a GPU, without
// any header; and for a CPU by a C++ compiler, after tests/kernels/host/on_cpu.h has defined ON_CPU and what differs there,
// with one thread for each block.

typedef unsigned int u32;
typedef unsigned long long u64;
struct Line { u32 a, b, c, d; };  // 16 bytes, aligned

#ifndef ON_CPU
__device__ __forceinline__ Line load_line(const void* at) {
  Line v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.a), "=r"(v.b), "=r"(v.c), "=r"(v.d) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_line(void* at, Line v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(at), "r"(v.a), "r"(v.b), "r"(v.c), "r"(v.d) : "memory");
}
__device__ __forceinline__ u32 load_word(const void* at) { return *(const volatile u32*)at; }
__device__ __forceinline__ void store_word(void* at, u32 v) { *(volatile u32*)at = v; }
__device__ __forceinline__ u64 load_pair(const void* at) { return *(const volatile u64*)at; }
__device__ __forceinline__ void store_pair(void* at, u64 v) { *(volatile u64*)at = v; }
__device__ __forceinline__ u32 load_flag(const void* at) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_flag(void* at, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ u64 now() {
  u64 v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
__device__ __forceinline__ float from_half(u32 bits) {
  float v;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(bits));
  return v;
}
__device__ __forceinline__ u32 to_half(float v) {
  u32 bits;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(bits) : "f"(v));
  return bits;
}
#define BITS(v) __float_as_uint(v)
#define FLOAT(v) __uint_as_float(v)
#define TIMES(a, b) __fmul_rn(a, b)  // these two are never one operation, which would round once
#define PLUS(a, b) __fadd_rn(a, b)
#define FENCE() __threadfence_system()
#define BARRIER() __syncthreads()
#define STOP() __trap()
#define SHARED __shared__
// The value of the lane of the same group whose number differs in the bit `step`.
#define OF_LANE(v, step) __shfl_xor_sync(LANES == 32 ? 0xffffffff : 0xffff << (threadIdx.x & 16), v, step)
#endif

// Lines of every rank that a thread asks for at once.
#define AHEAD (RANKS > 4 ? 2 : 4)

// From time to time what is seldom written is written anew, so that no number of a call is as old as its wrap around.
#define RENEW(call) (((call) & 0xfffff) == 0)

// The words of the control page: who is waited for in vain, then one word for each rank that was stopped by it.
struct Control { u32 lost; u32 stopped[8]; };

// One wait: it ends the kernel if a rank is known to be lost, or if it took longer than `limit` nanoseconds.
struct Patience {
  volatile Control* control;
  int rank;
  u64 limit, began;
  u32 turns;
  __device__ void wait(int peer) {
    if (++turns & 1023) return;
    u64 time = now();
    if (!began) began = time;
    if (!control->lost && time - began > limit) control->lost = peer + 1;
    if (control->lost) {
      control->stopped[rank] = 1;
      FENCE();
      STOP();
    }
  }
};

// Where a rank finds what each rank has written for it, and where it writes: once for all, or for each other one; then 0.
struct Places {
  char *of[RANKS], *to[RANKS];
  __device__ void put(u64 at, Line v) const {
#pragma unroll
    for (int k = 0; k < RANKS - 1; k++)
      if (k == 0 || to[k]) store_line(to[k] + at, v);
  }
  __device__ void put_flag(u64 at, u32 v) const {
#pragma unroll
    for (int k = 0; k < RANKS - 1; k++)
      if (k == 0 || to[k]) store_flag(to[k] + at, v);
  }
};

// In bf16: to the nearest, ties to even; not a number stays so.
__device__ __forceinline__ u32 brain(float v) {
  u32 bits = BITS(v);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#if KIND == 2
#define VALUES 1
__device__ __forceinline__ void add_word(float* total, u32 word) { total[0] += FLOAT(word); }
__device__ __forceinline__ u32 rounded(const float* total) { return BITS(total[0]); }
#elif KIND == 1
#define VALUES 2
__device__ __forceinline__ void add_word(float* total, u32 word) {
  total[0] += from_half(word & 0xffff);
  total[1] += from_half(word >> 16);
}
__device__ __forceinline__ u32 rounded(const float* total) { return to_half(total[0]) | to_half(total[1]) << 16; }
#else
#define VALUES 2
__device__ __forceinline__ void add_word(float* total, u32 word) {
  total[0] += FLOAT(word << 16);
  total[1] += FLOAT(word & 0xffff0000);
}
__device__ __forceinline__ u32 rounded(const float* total) { return brain(total[0]) | brain(total[1]) << 16; }
#endif

struct Total {  // the sum of one line, in fp32
  float of[4][VALUES];
  __device__ void clear() {
    for (int word = 0; word < 4; word++)
      for (int value = 0; value < VALUES; value++) of[word][value] = 0;
  }
  __device__ void add(Line v) {
    add_word(of[0], v.a);
    add_word(of[1], v.b);
    add_word(of[2], v.c);
    add_word(of[3], v.d);
  }
  __device__ Line line() const { return Line{rounded(of[0]), rounded(of[1]), rounded(of[2]), rounded(of[3])}; }
};

// One shot. Two words of the values and the number of the call twice are one line, so that each half of it says by itself
// whether it has arrived. `count` is the number of pairs of words; those from `from` to `to`, at least one, are summed, or
// else gathered: `y` is [RANKS, count] then. Two slots of `slot` bytes lie at each place. Addresses are read once.
extern "C" __global__ void one_shot(const uint2* x, uint2* y, int count, int from, int to, int gather, const Places* given,
                                    u64 slot, int rank, u32* calls, Control* control, u64 limit) {
  Places places = *given;
  u32 call = calls[blockIdx.x] + 1;
  u64 here = (call & 1) * slot;
  int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int i = first; i < count; i += step) places.put(here + 16ull * i, Line{x[i].x, call, x[i].y, call});
  if (RENEW(call >> 1))
    for (int i = count + first; i < slot / 16; i += step) places.put(here + 16ull * i, Line{0, call, 0, call});
  Patience patience{control, rank, limit, 0, 0};
  for (int i = from + first; i < to; i += AHEAD * step) {
    Line got[AHEAD][RANKS];  // what is asked for before the first answer has come
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
#pragma unroll
      for (int peer = 0; peer < RANKS; peer++)
        if (i + k * step < to && peer != rank) got[k][peer] = load_line(places.of[peer] + here + 16ull * (i + k * step));
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      int at = i + k * step;
      if (at >= to) break;
      float low[VALUES] = {}, high[VALUES] = {};
#pragma unroll
      for (int peer = 0; peer < RANKS; peer++) {
        Line line = peer == rank ? Line{x[at].x, call, x[at].y, call} : got[k][peer];
        while (line.b != call || line.d != call) {
          patience.wait(peer);
          line = load_line(places.of[peer] + here + 16ull * at);
        }
        if (gather) y[(u64)peer * count + at] = uint2{line.a, line.c};
        add_word(low, line.a);
        add_word(high, line.c);
      }
      if (!gather) y[at - from] = uint2{rounded(low), rounded(high)};
    }
  }
  BARRIER();
  if (threadIdx.x == 0) calls[blockIdx.x] = call;
}

// Whether a flag has announced a call. A rank that was set aside between two looks may find the next call's number: the
// other rank has read what it needed of this call, and cannot end the next one before this rank takes part in it.
__device__ __forceinline__ bool announced(const void* flag, u32 call) {
  u32 found = load_flag(flag);
  return found == call || found == call + 1;
}

// Wait in thread `peer` of a block until a rank has set its flag of this block.
__device__ __forceinline__ void await_block(const Places* given, u64 flag, int rank, u32 call, Control* control, u64 limit) {
  Patience patience{control, rank, limit, 0, 0};
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) {
    char* theirs = given->of[peer] + flag;
    while (peer != rank && !announced(theirs, call)) patience.wait(peer);
  }
  BARRIER();
}

// Blocks with a flag each. Every block of a rank works with the same block of the others. In one step it sums all values
// of its part; in two steps (`shares` is RANKS) it sums its share of them and hands the sums on; or it gathers, in one
// step, and `y` is [RANKS, count]. `count` is the number of lines. At each place lie two slots for values, two for sums,
// and flags, one for each block and step, 64 bytes apart.
extern "C" __global__ void in_blocks(const Line* x, Line* y, int count, int gather, int shares, const Places* given,
                                     u64 slot, int rank, u32* calls, Control* control, u64 limit) {
  Places places = *given;
  u32 call = calls[blockIdx.x] + 1;
  u64 values = (call & 1) * slot, sums = (2 + (call & 1)) * slot;
  u64 sent = 4 * slot + 64 * blockIdx.x, summed = sent + 64 * gridDim.x;
  int part = (count + gridDim.x - 1) / gridDim.x, first = blockIdx.x * part;
  int last = min(count, first + part), share = (part + shares - 1) / shares;
  if (first < count) {
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) places.put(values + 16ull * i, x[i]);
    BARRIER();
    if (threadIdx.x == 0) places.put_flag(sent, call);
    await_block(given, sent, rank, call, control, limit);
    int from = shares > 1 ? min(last, first + rank * share) : first, to = shares > 1 ? min(last, from + share) : last;
    for (int i = from + threadIdx.x; i < to; i += AHEAD * blockDim.x) {
      Line got[AHEAD][RANKS];  // what is asked for before the first answer has come
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) {
          int at = i + k * blockDim.x;
          if (at < to) got[k][peer] = peer == rank ? x[at] : load_line(places.of[peer] + values + 16ull * at);
        }
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        int at = i + k * blockDim.x;
        if (at >= to) break;
        if (gather) {
#pragma unroll
          for (int peer = 0; peer < RANKS; peer++) y[(u64)peer * count + at] = got[k][peer];
          continue;
        }
        Total total;
        total.clear();
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) total.add(got[k][peer]);
        Line line = total.line();
        y[at] = line;
        if (shares > 1) places.put(sums + 16ull * at, line);
      }
    }
    if (shares > 1) {
      BARRIER();
      if (threadIdx.x == 0) places.put_flag(summed, call);
      await_block(given, summed, rank, call, control, limit);
      // A thread asks for the sums that lie at the same place of each other rank's share.
      for (int i = threadIdx.x; i < share; i += AHEAD * blockDim.x) {
        Line got[AHEAD][RANKS];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
#pragma unroll
          for (int peer = 0; peer < RANKS; peer++) {
            int place = i + k * blockDim.x, at = first + peer * share + place;
            if (peer != rank && place < share && at < last) got[k][peer] = load_line(places.of[peer] + sums + 16ull * at);
          }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
#pragma unroll
          for (int peer = 0; peer < RANKS; peer++) {
            int place = i + k * blockDim.x, at = first + peer * share + place;
            if (peer != rank && place < share && at < last) y[at] = got[k][peer];
          }
      }
    }
  } else if (threadIdx.x == 0) {  // nothing to do, and no flag grows old
    places.put_flag(sent, call);
    places.put_flag(summed, call);
  }
  BARRIER();
  if (threadIdx.x == 0) calls[blockIdx.x] = call;
}

// Groups of 128 values in 8 bits, as by the format int8 of kernels/bit_split, bit for bit. LANES threads share a group, whose
// lines lie one after the other; each has a unit of OWN of them. The codes of a line take CODES bytes.
#define GROUP (32 / VALUES)
#ifndef LANES
#define LANES GROUP
#endif
#define OWN (GROUP / LANES)
#define CODES (4 * VALUES)
#define FOUR (4 * LANES)  // the units of four groups, whose scales and zeros are one line
#define UNITS (RANKS > 2 ? AHEAD : 8)  // of every rank that a thread asks for at once

// The line `k` of a unit.
__device__ __forceinline__ int line_of(int unit, int k) { return unit / LANES * GROUP + unit % LANES + k * LANES; }

struct Coded {
  u64 codes[OWN];  // the lower half alone in fp32
  u32 scale;  // and above it zero, in bf16; the scale of a group with infinities or what is not a number is not a number

  __device__ void encode(const Total* values) {
    float low = 3.402823466e38f, high = -low;
    u32 broken = 0;
    for (int k = 0; k < OWN; k++)
      for (int word = 0; word < 4; word++)
        for (int v = 0; v < VALUES; v++) {
          float value = values[k].of[word][v];
          broken |= (BITS(value) & 0x7f800000) == 0x7f800000;
          low = value < low ? value : low;
          high = value > high ? value : high;
        }
    for (int step = LANES / 2; step; step /= 2) {
      float lower = OF_LANE(low, step), higher = OF_LANE(high, step);
      low = lower < low ? lower : low;
      high = higher > high ? higher : high;
      broken |= OF_LANE(broken, step);
    }
    low = broken ? 0 : flushed(low);
    high = broken ? 0 : flushed(high);
    u32 zero = brain(low);
    float base = FLOAT(zero << 16), step = TIMES(high - base, (float)(1.0 / 255)), least = 7.888609052210118e-31f;  // 2^-100
    scale = brain(step > least ? step : least);
    broken |= (scale & 0x7f80) == 0x7f80 || (zero & 0x7f80) == 0x7f80;
    float inverse = 1.0f / FLOAT(scale << 16);
    for (int k = 0; k < OWN; k++) {
      codes[k] = 0;
      for (int word = 0; word < 4; word++)
        for (int v = 0; v < VALUES; v++) {
          float code = TIMES(values[k].of[word][v] - base, inverse);
          code = code > 0 ? code : 0;
          code = code < 255 ? code : 255;
          u64 byte = BITS(PLUS(code, 12582912.0f)) & 255;  // from 1.5 * 2^23 on an fp32 number has no fraction bits
          codes[k] |= (broken ? 0 : byte) << 8 * (word * VALUES + v);
        }
    }
    scale = broken ? 0x7fc0 : scale | zero << 16;
  }
  __device__ void encode(const Line* x, int unit) {
    Total values[OWN];
    for (int k = 0; k < OWN; k++) {
      values[k].clear();
      values[k].add(x[line_of(unit, k)]);
    }
    encode(values);
  }
  __device__ void add_to(Total* total) const {
    for (int k = 0; k < OWN; k++)
      for (int word = 0; word < 4; word++)
        for (int v = 0; v < VALUES; v++) {
          float code = (float)(u32)(codes[k] >> 8 * (word * VALUES + v) & 255);
          total[k].of[word][v] += PLUS(TIMES(code, FLOAT(scale << 16)), FLOAT(scale & 0xffff0000));
        }
  }
  __device__ void decode(Total* total) const {
    for (int k = 0; k < OWN; k++) total[k].clear();
    add_to(total);
  }
  __device__ void store(char* to, int unit) const {
    for (int k = 0; k < OWN; k++) {
      char* at = to + (u64)CODES * line_of(unit, k);
      if (CODES == 8) store_pair(at, codes[k]);
      else store_word(at, (u32)codes[k]);
    }
  }
  __device__ void load(const char* from, int unit) {
    for (int k = 0; k < OWN; k++) {
      const char* at = from + (u64)CODES * line_of(unit, k);
      codes[k] = CODES == 8 ? load_pair(at) : load_word(at);
    }
  }
  __device__ static float flushed(float v) { return (BITS(v) & 0x7f800000) ? v : 0; }
};

// Send the scales and zeros of so many units, and announce them and the codes that the block has sent.
__device__ __forceinline__ void hand_on(const Line* scales, int units, char* to, char* flag, u32 call) {
  BARRIER();
  for (int i = threadIdx.x; i * FOUR < units; i += blockDim.x) store_line(to + 16ull * i, scales[i]);
  BARRIER();
  if (threadIdx.x == 0) store_flag(flag, call);
}

// Blocks as in `in_blocks`, for whole groups in memory of the host: in one step between two ranks, in two steps among more,
// which encode the sums, too, before they are rounded. Codes of all lines come first, then scales and zeros of groups,
// which lie in shared memory on their way, because a few bytes at a time are slow on the link. At each place lie two slots
// for values, two for sums, and flags, one for each block and step.
extern "C" __global__ void in_codes(const Line* x, Line* y, int count, const Places* given, u64 slot, int rank, u32* calls,
                                    Control* control, u64 limit) {
  SHARED Line scales[GROUPS / 4 + RANKS];  // RANKS more, because shares are rounded up
  u32* scale_of = (u32*)scales;
  char* own = given->to[0];
  const char* others[RANKS - 1];  // in the order of ranks
#pragma unroll
  for (int k = 0; k < RANKS - 1; k++) others[k] = given->of[k + (k >= rank)];
  u32 call = calls[blockIdx.x] + 1;
  u64 sent = 4 * slot + 64 * blockIdx.x, summed = sent + 64 * gridDim.x;
  // A part and a share of it have whole lines of scales. What this block and this rank have of them may be empty.
  int part = (count / GROUP + 4 * gridDim.x - 1) / (4 * gridDim.x), share = RANKS > 2 ? (part + RANKS - 1) / RANKS : part;
  int first = blockIdx.x * part * 4 * GROUP, units = max(0, min(count - first, part * 4 * GROUP)) / OWN;
  int from = RANKS > 2 ? min(units, rank * share * FOUR) : 0, to = min(units, from + share * FOUR);
  // Where the part lies at each place; its sums lie two slots further.
  u64 codes = (call & 1) * slot + (u64)CODES * first, lines = (call & 1) * slot + (u64)CODES * count + 4ull * (first / GROUP);
  x += first;
  y += first;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    Coded coded;
    coded.encode(x, unit);
    coded.store(own + codes, unit);
    if (unit % LANES == 0) scale_of[unit / LANES] = coded.scale;
  }
  hand_on(scales, units, own + lines, own + sent, call);
  if (units > 0) await_block(given, sent, rank, call, control, limit);
  for (int begin = from; begin < to; begin += UNITS * blockDim.x) {
    Coded got[UNITS][RANKS - 1];  // what is asked for before the first answer has come
#pragma unroll
    for (int n = 0; n < UNITS; n++)
#pragma unroll
      for (int k = 0; k < RANKS - 1; k++) {
        int unit = begin + n * blockDim.x + threadIdx.x;
        if (unit < to) got[n][k].load(others[k] + codes, unit);
      }
    if (begin == from) {
      for (int i = threadIdx.x; i < (RANKS - 1) * share; i += blockDim.x) {
        int k = i / share, line = from / FOUR + i % share;
        if (line * FOUR < to) scales[i] = load_line(given->of[k + (k >= rank)] + lines + 16ull * line);
      }
      BARRIER();
    }
#pragma unroll
    for (int n = 0; n < UNITS; n++) {
      int unit = begin + n * blockDim.x + threadIdx.x, group = (unit - from) / LANES;
      if (unit >= to) continue;
      Coded coded;
      coded.encode(x, unit);
      Total total[OWN];
      for (int k = 0; k < OWN; k++) total[k].clear();
#pragma unroll
      for (int k = 0; k < RANKS; k++) {
        if (k == rank) coded.add_to(total);
        if (k == RANKS - 1) break;
        got[n][k].scale = scale_of[4 * k * share + group];
        got[n][k].add_to(total);
      }
      if (RANKS > 2) {
        coded.encode(total);
        coded.store(own + 2 * slot + codes, unit);
        if (unit % LANES == 0) scale_of[4 * (RANKS - 1) * share + group] = coded.scale;
        coded.decode(total);
      }
      for (int k = 0; k < OWN; k++) y[line_of(unit, k)] = total[k].line();
    }
  }
  if (RANKS > 2) {
    hand_on(scales + (RANKS - 1) * share, to - from, own + 2 * slot + lines + 16ull * (from / FOUR), own + summed, call);
    if (units > 0) await_block(given, summed, rank, call, control, limit);
    // A thread asks for the sums that lie at the same place of each other rank's share.
    for (int begin = 0; begin < share * FOUR; begin += UNITS * blockDim.x) {
      Coded got[UNITS][RANKS - 1];
#pragma unroll
      for (int n = 0; n < UNITS; n++)
#pragma unroll
        for (int k = 0; k < RANKS - 1; k++) {
          int place = begin + n * blockDim.x + threadIdx.x, unit = (k + (k >= rank)) * share * FOUR + place;
          if (place < share * FOUR && unit < units) got[n][k].load(others[k] + 2 * slot + codes, unit);
        }
      if (begin == 0) {
        for (int i = threadIdx.x; i * FOUR < units; i += blockDim.x)
          if (i / share != rank) scales[i] = load_line(given->of[i / share] + 2 * slot + lines + 16ull * i);
        BARRIER();
      }
#pragma unroll
      for (int n = 0; n < UNITS; n++)
#pragma unroll
        for (int k = 0; k < RANKS - 1; k++) {
          int place = begin + n * blockDim.x + threadIdx.x, unit = (k + (k >= rank)) * share * FOUR + place;
          if (place >= share * FOUR || unit >= units) continue;
          Total total[OWN];
          got[n][k].scale = scale_of[unit / LANES];
          got[n][k].decode(total);
          for (int i = 0; i < OWN; i++) y[line_of(unit, i)] = total[i].line();
        }
    }
  }
  BARRIER();
  if (threadIdx.x == 0) calls[blockIdx.x] = call;
}

// What copy engines move is announced and awaited by these, one block each. The number of the call is `*calls` + 1.
extern "C" __global__ void announce(char* flag, const u32* calls) {
  FENCE();
  store_flag(flag, *calls + 1);
}

// Wait until all other ranks have announced what belongs to `back` calls before this one.
extern "C" __global__ void await_all(char* flag, u64 region, int rank, const u32* calls, u32 back, Control* control, u64 limit) {
  u32 call = *calls + 1 - back;
  Patience patience{control, rank, limit, 0, 0};
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x)
    while (peer != rank && !announced(flag + peer * region, call)) patience.wait(peer);
  FENCE();
  BARRIER();
}

// The end of a call: the other ranks may write over what this one has read.
extern "C" __global__ void finish(char* flag, char* pieces, int count, u32* calls) {
  u32 call = *calls + 1;
  if (RENEW(call))
    for (int piece = 0; piece < count; piece++) store_flag(pieces + 64 * piece, call);
  FENCE();
  store_flag(flag, call);
  *calls = call;
}

// The sum of this rank's values and of those of the others, `others` [RANKS, count] with this rank's place left empty.
extern "C" __global__ void add_parts(const Line* own, const Line* others, Line* y, int count, int rank) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    Total total;
    total.clear();
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) total.add(peer == rank ? own[i] : others[(u64)peer * count + i]);
    y[i] = total.line();
  }
}
