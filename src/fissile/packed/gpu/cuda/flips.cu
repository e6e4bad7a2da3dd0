// A packed layer of five to eight children a parent, for five to eight samples.
//
// Every combination of an owner's three bits flips the sign of a copy of the weight. Eight products with
// these copies, and the Walsh transform of their sums, tell the children apart.
//
// A block has four warps more than multiply: they add up the others' sums, undo the transform and store.
//
// Compiled also with KEPT, the runs of 32 inputs a warp keeps in registers, for which there is no room in
// shared memory.

constexpr int FINISHERS = 4;
constexpr int THREADS = (WARPS + FINISHERS) * 32;
constexpr int TILES = SLICE / 16;     // of 16 inputs, of a warp
constexpr int RUNS = SLICE / 32;      // of 32 inputs
constexpr int RUN = 8 * 32 * 2;       // bytes, of eight samples
constexpr int SUMS = 8 * 4 * 32 * 4;  // bytes of a warp
constexpr int FIRST = KEPT ? KEPT : 2;  // runs, without which a warp cannot begin
static_assert(KEPT % 2 == 0 && KEPT * RUN <= SUMS, "runs that are kept come through the place of the sums");
static_assert(AHEAD == 1, "the copies that end with the weights of step 1 are awaited there");

// Where in shared memory what lies.
constexpr int AT_SUMS = WARPS * STAGES * STAGE;
constexpr int AT_INPUTS = AT_SUMS + WARPS * SUMS;
constexpr int AT_GATES = AT_INPUTS + WARPS * (RUNS - KEPT) * RUN;

// 16 x 16 weights, the bits of their owners where signs are, and the first copies.
struct Tile {
  words w, bit0, bit1, w1, w3;

  __device__ __forceinline__ void make_bit0() { bit0 = shifted(w, 15); }
  __device__ __forceinline__ void make_w1() { w1 = flipped(w, bit0); }
  __device__ __forceinline__ void make_w3() {
    bit1 = shifted(w, 14);
    w3 = flipped(w1, bit1);
  }
};

// Multiply a tile. The matrix units are to have the next copy when they are done with one: so copies
// are made two products before they are needed, and the first ones of the next tile during the last.
__device__ __forceinline__ void add_tile(float (&sums)[8][4], const Tile& now, Tile& next, bool more, word x0,
                                         word x1) {
  multiply(sums[0], now.w, x0, x1);
  const words bit2 = shifted(now.w, 13), w2 = flipped(now.w, now.bit1);
  multiply(sums[1], now.w1, x0, x1);
  const words w6 = flipped(w2, bit2);
  multiply(sums[3], now.w3, x0, x1);
  const words w7 = flipped(now.w3, bit2);
  multiply(sums[2], w2, x0, x1);
  const words w5 = flipped(now.w1, bit2);
  multiply(sums[6], w6, x0, x1);
  const words w4 = flipped(now.w, bit2);
  multiply(sums[7], w7, x0, x1);
  if (more) next.make_bit0();
  multiply(sums[5], w5, x0, x1);
  if (more) next.make_w1();
  multiply(sums[4], w4, x0, x1);
  if (more) next.make_w3();
}

// The inputs of a warp: runs of 32 of all samples. They come while the first weights are multiplied.
struct Inputs {
  const number* x;  // what this lane copies of the first run
  word first_at, others_at;
  bool there;

  // Lane 4 s + e copies 16 bytes of sample s, dealt so that samples lie in different banks.
  __device__ __forceinline__ Inputs(const number* slice, word first, word others, int batch, int lane)
      : there(lane / 4 < batch) {
    const int sample = lane / 4, eight = lane & 3;
    const word at = sample * 64 + ((eight ^ lane >> 3) << 4);
    x = slice + (there ? sample * INPUTS + eight * 8 : 0);
    first_at = first + at, others_at = others + at;
  }

  __device__ __forceinline__ void fetch(int run) const {
    copy_if(there, run < KEPT ? first_at + run * RUN : others_at + (run - KEPT) * RUN, x + run * 32);
  }
};

// What a lane of the warps that finish has to do with: two products of what lane `other` of all the
// warps that multiply found, and after that two children.
struct Part {
  int other, pair;

  __device__ __forceinline__ Part(int part, int lane) : other(part * 8 + (lane & 7)), pair(lane / 8) {}

  // Of four sums, the first two are of one parent, the others of the eighth after it.
  __device__ __forceinline__ Mine<2> mine(int tile, int i) const {
    return {tile * 16 + other / 4 + i / 2 * 8, pair * 2, (other & 3) * 2 + (i & 1)};
  }
};

// Add the sums of all warps, undo the transform, and store.
__device__ __forceinline__ void finish(word sums, Part part, int tile, int lane, const Numbers<2> (&biases)[2],
                                       number* y, int batch, int parents) {
  float of[2][4] = {};
  sums += part.pair * 1024 + part.other * 16;
  add_warps<SUMS>(of[0], sums);
  add_warps<SUMS>(of[1], sums + 512);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float out[2] = {of[0][i] + of[1][i], of[0][i] - of[1][i]};  // by bit 0 of the owner
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
      for (int bit = 8; bit < 32; bit *= 2) {  // bits 1 and 2 are in other lanes
        const float other = __shfl_xor_sync(~0u, out[k], bit);
        out[k] = lane & bit ? other - out[k] : other + out[k];
      }
      out[k] *= 0.125f;
    }
    store_outputs(y, part.mine(tile, i), out, biases[i / 2], batch, parents);
  }
}

// What the warps do that do not multiply.
__device__ __forceinline__ void finish_tiles(word sums, word written, word read, Part part, int lane,
                                             const number* bias, number* y, int batch, int parents) {
  word round = 0;
  for (int tile = blockIdx.x; tile < parents / 16; tile += gridDim.x, round++) {
    // Biases will have come when they are needed.
    const Numbers<2> biases[2] = {load_biases(bias, part.mine(tile, 0)), load_biases(bias, part.mine(tile, 2))};
    await(written, round);
    finish(sums, part, tile, lane, biases, y, batch, parents);
    come(read, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    flips(const number* __restrict__ x, const number* __restrict__ w, const number* __restrict__ bias,
          number* __restrict__ y, int batch, int parents) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tiles = parents / 16, blocks = gridDim.x;
  const word base = shared_at(memory), sums_at = base + AT_SUMS;
  const word written = base + AT_GATES, read = written + 8;
  let_next_come();
  // The weights may still change, but what a warp copies first may be on its way.
  if (warp < WARPS && lane < 16) want(w + ((size_t)blockIdx.x * 16 + lane) * INPUTS + warp * SLICE, 128);
  if (threadIdx.x == 0) {
    make_gate(written, WARPS);
    make_gate(read, FINISHERS);
  }
  __syncthreads();
  await_kernels_before();
  if (warp >= WARPS) {
    finish_tiles(sums_at, written, read, Part(warp - WARPS, lane), lane, bias, y, batch, parents);
    return;
  }
  const word own_sums = sums_at + warp * SUMS;
  const word others = base + AT_INPUTS + warp * (RUNS - KEPT) * RUN;
  const Inputs inputs(x + warp * SLICE, own_sums, others, batch, lane);
#pragma unroll
  for (int run = 0; run < FIRST; run++) inputs.fetch(run);
  if (KEPT) end_of_copies();
  Ring ring(base + warp * (STAGES * STAGE), w, warp, lane);
  ring.begin();
#pragma unroll
  for (int run = FIRST; run < RUNS; run++) inputs.fetch(run);  // awaited with the weights of step 1

  // What this lane reads: a row of a tile, and 16 bytes of a sample's inputs of a run.
  const word from = ring.tile_at(lane);
  const word tile_at[4] = {from, from ^ 32, from ^ 64, from ^ 96};
  const word sample_at = (lane & 7) * 64 + ((lane / 8 ^ (lane & 7) >> 1) << 4);
  words kept_runs[KEPT + 1];
  if (KEPT) await_copies<AHEAD>();
#pragma unroll
  for (int run = 0; run < KEPT; run++) kept_runs[run] = load_matrices(own_sums + run * RUN + sample_at);
  __syncwarp();

  word round = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += blocks, round++) {
    const number* now = ring.next;
    const bool more = tile + blocks < tiles;
    ring.next += (size_t)blocks * 16 * INPUTS;
    float sums[8][4] = {};
    Tile held[2];
    words run_now, run_next;
    auto get = [&](int t) {
      if (t % 4 == 0) ring.await_step(t / 4, now, more);
      held[t & 1].w = load_matrices(tile_at[t & 3] + ring.slot(t / 4));
      const int run = t / 2;
      if (t % 2 == 0)
        run_next = run < KEPT ? kept_runs[run] : load_matrices(others + (run - KEPT) * RUN + sample_at);
      if (t % 4 == 3) ring.leave_step();
    };
    get(0);
    held[0].make_bit0(), held[0].make_w1(), held[0].make_w3();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if (t % 2 == 0) run_now = run_next;
      if (t + 1 < TILES) get(t + 1);
      const bool odd = t & 1;
      const word x0 = odd ? run_now.c : run_now.a, x1 = odd ? run_now.d : run_now.b;
      add_tile(sums, held[odd], held[!odd], t + 1 < TILES, x0, x1);
    }
    if (round) await(read, round - 1);
#pragma unroll
    for (int v = 0; v < 8; v++)
      store_shared(own_sums + v * 512 + lane * 16, __float_as_uint(sums[v][0]), __float_as_uint(sums[v][1]),
                   __float_as_uint(sums[v][2]), __float_as_uint(sums[v][3]));
    come(written, lane);
  }
}
