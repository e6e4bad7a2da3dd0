// What the kernels of packed layers share: weights on their way, flips, and what makes sums outputs.
//
// A block takes 16 parents at a time and all inputs. Each of 16 warps multiplies a sixteenth of them,
// always the same ones, while the weights that come next are on their way to shared memory.
//
// Compiled with INPUTS, a multiple of 1024; STAGES; ALPHA; BIAS; ACTIVATION; BFLOAT16.
#pragma once

typedef unsigned short number;  // 16 bits of a weight, an input or an output

constexpr int WARPS = 16;              // that multiply
constexpr int SLICE = INPUTS / WARPS;  // inputs of a warp
constexpr int STEPS = SLICE / 64;      // of 64 inputs
constexpr int AHEAD = STAGES - 1;
constexpr int STAGE = 16 * 64 * 2;          // bytes
constexpr bool FITS = STEPS % STAGES == 0;  // then each step has a stage of its own
static_assert(INPUTS % 1024 == 0 && STEPS >= AHEAD, "a warp has whole steps, and enough to begin with");

// The weights of a warp on their way, 16 x 64 in each stage.
struct Ring {
  const number* next;  // what this lane copies of the next tile
  word from, to, put, out_of;
  Once once;

  // Eight lanes copy 128 bytes of a row; the 16 bytes of a row are dealt so that eight rows of the
  // same columns lie in different banks.
  __device__ __forceinline__ Ring(word ring, const number* w, int warp, int lane) : from(ring), out_of(0) {
    const int row = lane / 8, eight = lane % 8;
    next = w + ((size_t)blockIdx.x * 16 + row) * INPUTS + warp * SLICE + eight * 8;
    to = ring + row * 128 + ((eight ^ row) << 4);
    // Each lane keeps its own place in the ring. With one that is the same in all lanes, the assembler
    // of CUDA 13.0 may put it into a uniform register, and of a copy with a hint for the cache that
    // makes an illegal instruction: so it did in a kernel much like these.
    put = to;
  }

  __device__ __forceinline__ void fetch(int step, const number* tile) {
    const word even = FITS ? to + step % STAGES * STAGE : put, odd = even ^ 64;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const number* source = tile + (size_t)(4 * i) * INPUTS + step % STEPS * 64;
      copy((i & 1 ? odd : even) + i * 512, source, once);
    }
    if (!FITS) put = put == to + AHEAD * STAGE ? to : put + STAGE;
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
      fetch(step, next);
      end_of_copies();
    }
  }

  // Wait for the weights of a step, and send for those of a later one, perhaps of the next tile. They
  // come to where the step before lay: all lanes have read that when they meet here.
  __device__ __forceinline__ void await_step(int step, const number* now, bool more) {
    await_copies<AHEAD - 1>();
    if (step + AHEAD < STEPS) fetch(step + AHEAD, now);
    else if (more) fetch(step + AHEAD, next);
    end_of_copies();
  }

  // Where a step lies, behind the first.
  __device__ __forceinline__ word slot(int step) const { return FITS ? step % STAGES * STAGE : out_of; }
  __device__ __forceinline__ void leave_step() {
    if (!FITS) out_of = out_of == AHEAD * STAGE ? 0 : out_of + STAGE;
  }

  // Which 16 bytes a lane names to load tile 0 of a step's four; the others are 32, 64 and 96 bytes
  // away, in the bits that deal them.
  __device__ __forceinline__ word tile_at(int lane) const {
    const int row = lane & 15;
    return from + row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
  }
};

__device__ __forceinline__ words flipped(words w, words tops) {
  constexpr word SIGNS = 0x80008000u;
  return {xor_some(w.a, tops.a, SIGNS), xor_some(w.b, tops.b, SIGNS), xor_some(w.c, tops.c, SIGNS),
          xor_some(w.d, tops.d, SIGNS)};
}

__device__ __forceinline__ words shifted(words w, int by) {
  return {w.a << by, w.b << by, w.c << by, w.d << by};
}

// Add what all warps found, each so many bytes after the last.
template <int BYTES>
__device__ __forceinline__ void add_warps(float (&total)[4], word sums) {
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    const words found = load_shared(sums + warp * BYTES);
    total[0] += __uint_as_float(found.a), total[1] += __uint_as_float(found.b);
    total[2] += __uint_as_float(found.c), total[3] += __uint_as_float(found.d);
  }
}

// The outputs of a lane, of so many children: parent, first child and sample.
template <int CHILDREN>
struct Mine {
  int parent, child, sample;

  __device__ __forceinline__ size_t at() const { return (size_t)parent * ALPHA + child; }
};

template <int CHILDREN>
struct Numbers {
  word pairs[CHILDREN / 2];

  __device__ __forceinline__ number operator[](int k) const { return (number)(pairs[k / 2] >> 16 * (k & 1)); }
};

template <int CHILDREN>
__device__ __forceinline__ Numbers<CHILDREN> load_biases(const number* bias, Mine<CHILDREN> mine) {
  Numbers<CHILDREN> found = {};
  if (!BIAS) return found;
  bias += mine.at();
  if (ALPHA == 8) {
    load_pairs(found.pairs, bias);
  } else {
#pragma unroll
    for (int k = 0; k < CHILDREN; k++)
      if (mine.child + k < ALPHA) found.pairs[k / 2] |= (word)load_one(bias + k) << 16 * (k & 1);
  }
  return found;
}

__device__ __forceinline__ float finished(float a) {
  if (ACTIVATION == 1) return a <= 0 ? 0.0f : a;
  if (ACTIVATION == 2) return 0.5f * a * (1 + erff(a * 0.7071067811865476f));
  if (ACTIVATION == 3) return a / (1 + expf(-1.5957691216057308f * (a + 0.044715f * a * a * a)));
  if (ACTIVATION == 4) return a / (1 + expf(-a));
  return a;
}

// Make outputs of sums and store them, if there are such a sample and such children.
template <int CHILDREN>
__device__ __forceinline__ void store_outputs(number* y, Mine<CHILDREN> mine, float (&out)[CHILDREN],
                                              Numbers<CHILDREN> biases, int batch, int parents) {
  if (mine.sample >= batch) return;
#pragma unroll
  for (int k = 0; k < CHILDREN; k++) {
    if (BIAS) out[k] += widened(biases[k]);
    out[k] = finished(out[k]);
  }
  Numbers<CHILDREN> all;
#pragma unroll
  for (int k = 0; k < CHILDREN; k += 2) all.pairs[k / 2] = rounded(out[k], out[k + 1]);
  y += (size_t)mine.sample * parents * ALPHA + mine.at();
  if (ALPHA == 8) {
    store_for_later(y, all.pairs);
  } else {
#pragma unroll
    for (int k = 0; k < CHILDREN; k++)
      if (mine.child + k < ALPHA) store_one(y + k, all[k]);
  }
}
