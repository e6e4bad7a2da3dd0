// warp.cuh, and the little of CUDA a kernel needs besides, for g++ on a processor.
#pragma once
#include "emulated_block.h"

// All of <math.h> would take longer to compile than everything else.
extern "C" float erff(float) noexcept;
extern "C" float expf(float) noexcept;

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

static void meet_warp(const char* what, void (*act)()) {
  meet(own_warp().meeting, LANES, what, act);
}

inline void __syncwarp() { meet_warp("__syncwarp", nullptr); }
inline void __syncthreads() { meet(everyone, blockDim.x, "__syncthreads", nullptr); }

inline word shared_at(const void* pointer) {
  const size_t offset = (size_t)((const unsigned char*)pointer - memory);
  if (offset > shared_bytes) fail("shared_at: not in shared memory");
  return SHARED_FROM + (word)offset;
}

struct Once {
  Once() {}
};

inline void let_next_come() {}
inline void await_kernels_before() { self().may_read = true; }
inline void want(const void* from, int bytes) {
  check_known(from, bytes, 16, "want");
  if (bytes % 16) fail("want: %d bytes", bytes);
}

static void start_copy(word to, const void* from) {
  Fiber& fiber = self();
  shared(to, 16, 16, "copy");
  if (from) check_range(from, 16, 16, "copy");
  const Copy wanted = {to, from, fiber.group};
  if (copies_are == 0 || (copies_are == 2 && random_word() & 1)) return perform(wanted);
  if (fiber.copies == 64) fail("copy: more under way than the emulation keeps");
  fiber.pending[fiber.copies++] = wanted;
}

inline void copy(word to, const void* from, Once) { start_copy(to, from); }
inline void copy_if(bool there, word to, const void* from) {
  start_copy(to, there ? from : nullptr);
}

inline void end_of_copies() { self().group++; }

template <int MOST>
inline void await_copies() {
  perform_before(self().group - MOST);
  __syncwarp();
}

inline words load(const void* from) {
  check_range(from, 16, 16, "load");
  words w;
  memcpy(&w, from, 16);
  return w;
}

inline unsigned short load_one(const void* from) {
  check_range(from, 2, 2, "load");
  return *(const unsigned short*)from;
}

inline void store_one(void* to, unsigned short number) {
  check_range(to, 2, 2, "store");
  *(unsigned short*)to = number;
}

template <int PAIRS>
inline void load_pairs(word (&pairs)[PAIRS], const void* from) {
  check_range(from, 4 * PAIRS, 4 * PAIRS, "load");
  memcpy(pairs, from, 4 * PAIRS);
}

template <int PAIRS>
inline void store_for_later(void* to, const word (&pairs)[PAIRS]) {
  check_range(to, 4 * PAIRS, 4 * PAIRS, "store");
  memcpy(to, pairs, 4 * PAIRS);
}

inline words load_shared(word from) {
  if (!(random_word() & 3)) pause_fiber();  // others may be quicker
  words w;
  memcpy(&w, shared(from, 16, 16, "load_shared"), 16);
  return w;
}

inline void store_shared(word to, word a, word b) {
  const word both[2] = {a, b};
  memcpy(shared(to, 8, 8, "store_shared"), both, 8);
}

inline void store_shared(word to, word a, word b, word c, word d) {
  const words all = {a, b, c, d};
  memcpy(shared(to, 16, 16, "store_shared"), &all, 16);
}

// Lane 4 g + t takes the pair t of row g of each matrix.
static void act_load_matrices() {
  Lane* lanes = own_warp().lanes;
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) {
      const word row = lanes[8 * i + lane / 4].given[0];
      memcpy(&lanes[lane].taken[i], memory + (row - SHARED_FROM) + lane % 4 * 4, 4);
    }
}

inline words load_matrices(word from) {
  shared(from, 16, 16, "load_matrices");
  Lane& lane = own_lane();
  lane.given[0] = from;
  meet_warp("load_matrices", act_load_matrices);
  return {lane.taken[0], lane.taken[1], lane.taken[2], lane.taken[3]};
}

inline float __uint_as_float(word bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

inline word __float_as_uint(float number) {
  word bits;
  memcpy(&bits, &number, 4);
  return bits;
}

inline float widened(unsigned short number) {
#if BFLOAT16
  return __uint_as_float((word)number << 16);
#else
  // A product makes the exponent right, also that of numbers below the normal ones.
  const float size = __uint_as_float((number & 0x7fffu) << 13) * 0x1p112f;
  const word infinite = size >= 0x1p16f ? 0x7f800000u : 0;
  return __uint_as_float(__float_as_uint(size) | infinite | (number & 0x8000u) << 16);
#endif
}

static word narrowed(float number) {
  word bits = __float_as_uint(number);
  const word sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7fff;
#if BFLOAT16
  return sign | (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
  if (bits >= 0x47800000u) return sign | 0x7c00;
  if (bits < 0x38800000u)  // the sum rounds where such a number ends
    return sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u);
  return sign | (bits - 0x38000000u + 0xfff + (bits >> 13 & 1)) >> 13;
#endif
}

inline word rounded(float first, float second) { return narrowed(first) | narrowed(second) << 16; }

static float half_of(word pair, int which) { return widened((unsigned short)(pair >> 16 * which)); }

// Number j of the 16 a row of A holds.
static float a_of(const Lane* lanes, int row, int j) {
  return half_of(lanes[4 * (row % 8) + j % 8 / 2].given[j / 8 * 2 + row / 8], j % 2);
}

static float& sum_of(const Lane* lanes, int row, int n) {
  return lanes[4 * (row % 8) + n / 2].sums[n % 2 + row / 8 * 2];
}

static void act_multiply_all() {
  const Lane* lanes = own_warp().lanes;
  float b[16][8];
  for (int n = 0; n < 8; n++)
    for (int k = 0; k < 16; k++)
      b[k][n] = half_of(lanes[4 * n + k % 8 / 2].given[4 + k / 8], k % 2);
  for (int row = 0; row < 16; row++) {
    float total[8];
    for (int n = 0; n < 8; n++) total[n] = sum_of(lanes, row, n);
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) total[n] += a_of(lanes, row, k) * b[k][n];
    for (int n = 0; n < 8; n++) sum_of(lanes, row, n) = total[n];
  }
}

inline void multiply(float (&sums)[4], words a, word b0, word b1) {
  Lane& lane = own_lane();
  const word given[6] = {a.a, a.b, a.c, a.d, b0, b1};
  memcpy(lane.given, given, sizeof given);
  lane.sums = sums;
  meet_warp("multiply", act_multiply_all);
}

// The column of stored weight j of a row: two bits of a lane that depends on all of them.
template <bool UPPER>
static int column_of(const Lane* lanes, int row, int j) {
  const word places = lanes[4 * (row % 8) + (UPPER ? 2 : 0) + (j >= 8)].given[8];
  return 4 * (j / 2) + (places >> (2 * (j % 8) + 16 * (row >= 8)) & 3);
}

template <bool UPPER>
static void act_multiply() {
  const Lane* lanes = own_warp().lanes;
  float b[32][8];
  for (int n = 0; n < 8; n++)
    for (int k = 0; k < 32; k++)
      b[k][n] = half_of(lanes[4 * n + k % 8 / 2].given[4 + k / 8], k % 2);
  for (int row = 0; row < 16; row++) {
    float total[8];
    for (int n = 0; n < 8; n++) total[n] = sum_of(lanes, row, n);
    for (int j = 0, before = -1; j < 16; j++) {
      const float a = a_of(lanes, row, j);
      const int column = column_of<UPPER>(lanes, row, j);
      if (column == before) fail("multiply: two weights of row %d in column %d", row, column);
      before = column;
      for (int n = 0; n < 8; n++) total[n] += a * b[column][n];
    }
    for (int n = 0; n < 8; n++) sum_of(lanes, row, n) = total[n];
  }
}

template <bool UPPER>
inline void multiply(float (&sums)[4], words a, words b, word places) {
  Lane& lane = own_lane();
  const word given[9] = {a.a, a.b, a.c, a.d, b.a, b.b, b.c, b.d, places};
  memcpy(lane.given, given, sizeof given);
  lane.sums = sums;
  meet_warp(UPPER ? "multiply<true>" : "multiply<false>", act_multiply<UPPER>);
}

static void act_shuffle() {
  Lane* lanes = own_warp().lanes;
  for (word lane = 0; lane < LANES; lane++) {
    if (lanes[lane].given[1] != lanes[0].given[1]) fail("__shfl_xor_sync: lanes disagree");
    lanes[lane].taken[0] = lanes[(lane ^ lanes[lane].given[1]) % LANES].given[0];
  }
}

inline word __shfl_xor_sync(word mask, word value, int by) {
  if (mask != ~0u) fail("__shfl_xor_sync: only for whole warps");
  Lane& lane = own_lane();
  lane.given[0] = value, lane.given[1] = (word)by;
  meet_warp("__shfl_xor_sync", act_shuffle);
  return lane.taken[0];
}

inline float __shfl_xor_sync(word mask, float value, int by) {
  return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(value), by));
}

inline word __byte_perm(word low, word high, word selector) {
  if (selector & 0xffff8888u) fail("__byte_perm: selector %x", selector);
  const uint64_t bytes = (uint64_t)high << 32 | low;
  word out = 0;
  for (int i = 0; i < 4; i++)
    out |= (word)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}

inline word __funnelshift_l(word low, word high, word by) {
  return (word)(((uint64_t)high << 32 | low) << by % 32 >> 32);
}

inline word xor_some(word first, word second, word third) { return first ^ (second & third); }
inline word or_some(word first, word second, word third) { return (first & second) | third; }
inline word choose(word first, word second, word third) {
  return (first & third) | (second & ~third);
}
inline word pinned(word number) { return number; }

// A gate is a word that says it is one, for how many warps and for how many more, and the round.
constexpr word GATE = 0x6a7e;

static word* gate_at(word gate, const char* what) {
  word* const found = (word*)shared(gate, 8, 8, what);
  if (found[0] >> 16 != GATE) fail("%s: there is no gate", what);
  return found;
}

inline void make_gate(word gate, int warps) {
  word* const made = (word*)shared(gate, 8, 8, "make_gate");
  made[0] = GATE << 16 | (word)warps << 8 | (word)warps;
  made[1] = 0;
}

inline void come(word gate, int lane) {
  __syncwarp();
  if (lane) return;
  word* const found = gate_at(gate, "come");
  if (--found[0] & 0xff) return;
  found[0] |= found[0] >> 8 & 0xff;
  found[1]++;
}

inline void await(word gate, word round) {
  wait_while(gate_at(gate, "await") + 1, 1, round & 1);
}
