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
  __device__ void put_pair(u64 at, u64 v) const {
#pragma unroll
    for (int k = 0; k < RANKS - 1; k++)
      if (k == 0 || to[k]) store_pair(to[k] + at, v);
  }
  __device__ void put_word(u64 at, u32 v) const {
#pragma unroll
    for (int k = 0; k < RANKS - 1; k++)
      if (k == 0 || to[k]) store_word(to[k] + at, v);
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
  FENCE();
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
    FENCE();
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
      FENCE();
      BARRIER();
      if (threadIdx.x == 0) places.put_flag(summed, call);
      await_block(given, summed, rank, call, control, limit);
      for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
        int owner = (i - first) / share;
        if (owner != rank) y[i] = load_line(given->of[owner] + sums + 16ull * i);
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
// lines lie one after the other; each has OWN of them. The codes of a line take CODES bytes.
#define GROUP (32 / VALUES)
#ifndef LANES
#define LANES GROUP
#endif
#define OWN (GROUP / LANES)
#define CODES (4 * VALUES)
#define MANY (2 * AHEAD)

struct Coded {
  u64 codes[OWN];  // the lower half alone in fp32
  u32 scale, zero;  // in bf16; the scale of a group that has infinities or what is not a number is not a number

  __device__ void encode(const Line* lines) {
    float low = 3.402823466e38f, high = -low;
    u32 broken = 0;
    for (int k = 0; k < OWN; k++)
      for (int word = 0; word < 4; word++) {
        float value[VALUES];
        values_of(lines[k], word, value);
        for (int v = 0; v < VALUES; v++) {
          broken |= (BITS(value[v]) & 0x7f800000) == 0x7f800000;
          low = value[v] < low ? value[v] : low;
          high = value[v] > high ? value[v] : high;
        }
      }
    for (int step = LANES / 2; step; step /= 2) {
      float lower = OF_LANE(low, step), higher = OF_LANE(high, step);
      low = lower < low ? lower : low;
      high = higher > high ? higher : high;
      broken |= OF_LANE(broken, step);
    }
    low = broken ? 0 : flushed(low);
    high = broken ? 0 : flushed(high);
    zero = brain(low);
    float base = FLOAT(zero << 16), step = TIMES(high - base, (float)(1.0 / 255)), least = 7.888609052210118e-31f;  // 2^-100
    scale = brain(step > least ? step : least);
    broken |= (scale & 0x7f80) == 0x7f80 || (zero & 0x7f80) == 0x7f80;
    float inverse = 1.0f / FLOAT(scale << 16);
    for (int k = 0; k < OWN; k++) {
      codes[k] = 0;
      for (int word = 0; word < 4; word++) {
        float value[VALUES];
        values_of(lines[k], word, value);
        for (int v = 0; v < VALUES; v++) {
          float code = TIMES(value[v] - base, inverse);
          code = code > 0 ? code : 0;
          code = code < 255 ? code : 255;
          u64 byte = BITS(PLUS(code, 12582912.0f)) & 255;  // from 1.5 * 2^23 on an fp32 number has no fraction bits
          codes[k] |= (broken ? 0 : byte) << 8 * (word * VALUES + v);
        }
      }
    }
    if (broken) scale = 0x7fc0, zero = 0;
  }
  __device__ static void values_of(Line line, int word, float* value) {
    for (int v = 0; v < VALUES; v++) value[v] = 0;
    add_word(value, word == 0 ? line.a : word == 1 ? line.b : word == 2 ? line.c : line.d);
  }
  __device__ static float flushed(float v) { return (BITS(v) & 0x7f800000) ? v : 0; }
  __device__ void add_to(Total& total, int k) const {
    for (int word = 0; word < 4; word++)
      for (int v = 0; v < VALUES; v++) {
        float code = (float)(u32)(codes[k] >> 8 * (word * VALUES + v) & 255);
        total.of[word][v] += PLUS(TIMES(code, FLOAT(scale << 16)), FLOAT(zero << 16));
      }
  }
};

#if RANKS == 2
// Blocks as in `in_blocks`, for whole groups between two ranks. Codes of all lines come first, then scales and zeros of
// groups, which lie in shared memory on their way, because a few bytes at a time are slow on the link. At each place lie
// two slots and flags, one for each block.
extern "C" __global__ void in_codes(const Line* x, Line* y, int count, const Places* given, u64 slot, int rank, u32* calls,
                                    Control* control, u64 limit) {
  SHARED u32 scale_of[GROUPS];
  Places places = *given;
  u32 call = calls[blockIdx.x] + 1;
  u64 codes = (call & 1) * slot, scales = codes + (u64)CODES * count, sent = 2 * slot + 64 * blockIdx.x;
  int part = (count / GROUP + 4 * gridDim.x - 1) / (4 * gridDim.x) * 4 * GROUP, first = blockIdx.x * part;
  int units = max(0, min(count, first + part) - first) / OWN;  // what threads have of groups
  int lines = (units / LANES + 3) / 4;  // of scales and zeros
  scales += 4ull * (first / GROUP);
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    int at = first + unit / LANES * GROUP + unit % LANES;
    Line own[OWN];
    for (int k = 0; k < OWN; k++) own[k] = x[at + k * LANES];
    Coded coded;
    coded.encode(own);
    for (int k = 0; k < OWN; k++) {
      u64 to = codes + (u64)CODES * (at + k * LANES);
      if (CODES == 8) places.put_pair(to, coded.codes[k]);
      else places.put_word(to, (u32)coded.codes[k]);
    }
    if (unit % LANES == 0) scale_of[unit / LANES] = coded.scale | coded.zero << 16;
  }
  BARRIER();
  for (int i = threadIdx.x; i < lines; i += blockDim.x)
    places.put(scales + 16ull * i, Line{scale_of[4 * i], scale_of[4 * i + 1], scale_of[4 * i + 2], scale_of[4 * i + 3]});
  FENCE();
  BARRIER();
  if (threadIdx.x == 0) places.put_flag(sent, call);
  if (units > 0) await_block(given, sent, rank, call, control, limit);
  const char* theirs = places.of[1 - rank];
  for (int begin = 0; begin < units; begin += MANY * blockDim.x) {
    u64 got[MANY][OWN];  // what is asked for before the first answer has come
#pragma unroll
    for (int n = 0; n < MANY; n++) {
      int unit = begin + n * blockDim.x + threadIdx.x, at = first + unit / LANES * GROUP + unit % LANES;
      if (unit >= units) continue;
      for (int k = 0; k < OWN; k++) {
        const char* there = theirs + codes + (u64)CODES * (at + k * LANES);
        got[n][k] = CODES == 8 ? load_pair(there) : load_word(there);
      }
    }
    if (begin == 0) {
      for (int i = threadIdx.x; i < lines; i += blockDim.x) {
        Line line = load_line(theirs + scales + 16ull * i);
        scale_of[4 * i] = line.a;
        scale_of[4 * i + 1] = line.b;
        scale_of[4 * i + 2] = line.c;
        scale_of[4 * i + 3] = line.d;
      }
      BARRIER();
    }
#pragma unroll
    for (int n = 0; n < MANY; n++) {
      int unit = begin + n * blockDim.x + threadIdx.x, at = first + unit / LANES * GROUP + unit % LANES;
      if (unit >= units) continue;
      Line own[OWN];
      for (int k = 0; k < OWN; k++) own[k] = x[at + k * LANES];
      Coded mine, other;
      mine.encode(own);
      other.scale = scale_of[unit / LANES] & 0xffff;
      other.zero = scale_of[unit / LANES] >> 16;
      for (int k = 0; k < OWN; k++) {
        other.codes[k] = got[n][k];
        Total total;
        total.clear();
        mine.add_to(total, k);  // the order of two numbers does not matter
        other.add_to(total, k);
        y[at + k * LANES] = total.line();
      }
    }
  }
  BARRIER();
  if (threadIdx.x == 0) calls[blockIdx.x] = call;
}
#endif

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
