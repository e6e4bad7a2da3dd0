// A packed layer of five to eight children a parent, for up to four samples.
//
// Bit 1 of an owner becomes a place. Think of every input twice, and of a weight in the first or the
// second of the two columns: rows of twice the length, half of them empty, which the sparse matrix
// units multiply at the price of full rows of the old length. Of eight columns of inputs, four hold
// the samples in first places and zeros in second ones, four the other way round: so a product tells
// children apart. Bits 0 and 2 flip signs, and the Walsh transform of four sums does the rest.

constexpr int THREADS = WARPS * 32;
constexpr int SUMS = 4 * 4 * 32 * 4;    // bytes of a warp
constexpr int SAMPLE = SLICE * 2 + 32;  // bytes; 32 more, so that samples lie in different banks

// Where in shared memory what lies.
constexpr int AT_SUMS = WARPS * STAGES * STAGE;
constexpr int AT_INPUTS = AT_SUMS + WARPS * SUMS;
constexpr int AT_NOTHING = AT_INPUTS + WARPS * 4 * SAMPLE;  // zeros
constexpr int AT_GATES = AT_NOTHING + SAMPLE;

// Bit 1 of the two weights of each of four words, in nibbles 0 to 3 and 4 to 7.
__device__ __forceinline__ word gathered(word a, word b, word c, word d) {
  word bits = a & 0x00020002u;
  bits = or_some(b << 4, 0x00200020u, bits);
  bits = or_some(c << 8, 0x02000200u, bits);
  return or_some(d << 12, 0x20002000u, bits);
}

// The places of the weights of two tiles: a lane of four needs what is in the hands of all four.
struct Exchange {
  word swap, turn, mix;

  __device__ __forceinline__ explicit Exchange(int lane)
      : swap(pinned(lane & 1 ? 0xf0f0f0f0u : 0x0f0f0f0fu)),
        turn(pinned(lane & 1 ? 28 : 4)),
        mix(pinned(lane & 2 ? 0x3715u : 0x6240u)) {}

  __device__ __forceinline__ word places(words one, words two) const {
    const word upper = gathered(one.a, one.c, two.a, two.c);  // rows 0 to 7
    const word lower = gathered(one.b, one.d, two.b, two.d);  // rows 8 to 15
    // A nibble for two weights: the first stands in place 0 or 2 of four, the second in 1 or 3.
    word own = __byte_perm(upper, lower, 0x5410) + (__byte_perm(upper, lower, 0x7632) << 2);
    word other = __shfl_xor_sync(~0u, own, 1);
    own = choose(own, __funnelshift_l(other, other, turn), swap);
    other = __shfl_xor_sync(~0u, own, 2);
    return __byte_perm(own, other, mix) | 0x44444444u;
  }
};

// Multiply 16 x 16 weights.
template <bool UPPER>
__device__ __forceinline__ void add_tile(float (&sums)[4][4], words w, words x, word places) {
  const words first = shifted(w, 15), second = shifted(w, 13);
  const words w1 = flipped(w, first), w2 = flipped(w, second);
  multiply<UPPER>(sums[0], w, x, places);
  multiply<UPPER>(sums[1], w1, x, places);
  multiply<UPPER>(sums[2], w2, x, places);
  multiply<UPPER>(sums[3], flipped(w1, second), x, places);
}

// Bring a warp's inputs to shared memory, in the order in which its lanes will need them: of every
// eight inputs the pairs 0 and 2, and elsewhere 1 and 3. Zeros for samples that are not there.
__device__ __forceinline__ void place_inputs(word to, const number* x, int batch, int lane) {
  words found[STEPS];
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    const int i = n * 32 + lane, sample = i / (8 * STEPS), eight = i % (8 * STEPS);
    found[n] = sample < batch ? load(x + (size_t)sample * INPUTS + eight * 8) : words{0, 0, 0, 0};
  }
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    const int i = n * 32 + lane, sample = i / (8 * STEPS), eight = i % (8 * STEPS);
    const word at = to + sample * SAMPLE + eight / 8 * 128 + eight % 8 * 8;
    store_shared(at, found[n].a, found[n].c);
    store_shared(at + 64, found[n].b, found[n].d);
  }
  __syncwarp();
}

// What a lane has to do with once the sums of all warps are added.
__device__ __forceinline__ Mine<4> mine_of(int tile, int part, int lane) {
  return {tile * 16 + part / 2 * 8 + lane / 4, lane & 2 ? 4 : 0, (lane & 1) * 2 + (part & 1)};
}

// Add the sums of all warps, undo the transform, and store the children of 16 parents. Four warps do.
__device__ __forceinline__ void finish(word sums, int lane, number* y, Mine<4> mine, Numbers<4> biases, int batch,
                                       int parents) {
  float of[4] = {0, 0, 0, 0};
  add_warps<SUMS>(of, sums);
  const float p = of[0] + of[1], m = of[0] - of[1];
  const float q = of[2] + of[3], n = of[2] - of[3];
  const float child[4] = {p + q, m + n, p - q, m - n};  // by bits 0 and 2 of the owner
  // Lane 4 g + t has bit 1 in t / 2: two lanes exchange halves, and each has four children in a row.
  const bool odd = lane & 2;
  const float one = __shfl_xor_sync(~0u, odd ? child[0] : child[2], 2);
  const float two = __shfl_xor_sync(~0u, odd ? child[1] : child[3], 2);
  float out[4] = {odd ? one : child[0], odd ? two : child[1], odd ? child[2] : one, odd ? child[3] : two};
#pragma unroll
  for (int k = 0; k < 4; k++) out[k] *= 0.25f;
  store_outputs(y, mine, out, biases, batch, parents);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    places(const number* __restrict__ x, const number* __restrict__ w, const number* __restrict__ bias,
           number* __restrict__ y, int batch, int parents) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tiles = parents / 16, blocks = gridDim.x;
  const word base = shared_at(memory);
  const word gates = base + AT_GATES, written = gates, read = gates + 8;
  let_next_come();
  if (threadIdx.x == 0) {
    make_gate(written, WARPS);
    make_gate(read, 4);
  }
  if (warp == 1)
    for (int i = lane; i < SAMPLE / 16; i += 32) store_shared(base + AT_NOTHING + i * 16, 0, 0, 0, 0);
  await_kernels_before();
  Ring ring(base + warp * (STAGES * STAGE), w, warp, lane);
  ring.begin();
  __syncthreads();
  const word inputs = base + AT_INPUTS + warp * (4 * SAMPLE);
  place_inputs(inputs, x + warp * SLICE, batch, lane);

  // What this lane reads: a row of a tile, and two pairs of every eight inputs of a sample. Of the
  // places of a pair, even lanes have the first, odd ones the second; zeros, where they are not those
  // of the column.
  const word from = ring.tile_at(lane);
  const word tile_at[4] = {from, from ^ 32, from ^ 64, from ^ 96};
  const bool lives = (lane & 1) == lane / 16;
  const word sample = lives ? inputs + (lane / 4 & 3) * SAMPLE : base + AT_NOTHING;
  const word sample_at = sample + (lane >> 1 & 1) * 64;
  const Exchange exchange(lane);

  word round = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += blocks, round++) {
    const number* now = ring.next;
    const bool more = tile + blocks < tiles, finishes = warp / 4 == (int)(round & 3);
    const Mine<4> outputs = mine_of(tile, warp & 3, lane);
    Numbers<4> biases = {};
    if (finishes) biases = load_biases(bias, outputs);  // they will have come when they are needed
    ring.next += (size_t)blocks * 16 * INPUTS;
    float sums[4][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      ring.await_step(step, now, more);
      const word slot = ring.slot(step);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const words one = load_matrices(tile_at[2 * half] + slot);
        const words two = load_matrices(tile_at[2 * half + 1] + slot);
        const words x1 = load_shared(sample_at + step * 128 + half * 32);
        const words x2 = load_shared(sample_at + step * 128 + half * 32 + 16);
        const word places = exchange.places(one, two);
        add_tile<false>(sums, one, x1, places);
        add_tile<true>(sums, two, x2, places);
      }
      ring.leave_step();
    }
    if (round) await(read, round - 1);
    const word sums_at = base + AT_SUMS + lane * 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
      store_shared(sums_at + warp * SUMS + i * 512, __float_as_uint(sums[0][i]), __float_as_uint(sums[1][i]),
                   __float_as_uint(sums[2][i]), __float_as_uint(sums[3][i]));
    come(written, lane);
    if (finishes) {
      await(written, round);
      finish(sums_at + (warp & 3) * 512, lane, y, outputs, biases, batch, parents);
      come(read, lane);
    }
  }
}
