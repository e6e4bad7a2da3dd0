// What 16 x 16 packed weights cost a scheduler of an H100 or H200, memory left aside.
//
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o pack_cycles benchmarks/pack_cycles.cu
//     ./pack_cycles
//
// Weights come from shared memory; their signs are flipped by the bits of the owner and the matrix
// units multiply all copies, as in src/fissile/packed/gpu. Prints cycles for each 16 x 16 weights, by
// the number of warps that share a scheduler. What else is issued beside a product adds nearly a cycle
// each (pack_overlap.cu takes that apart).
//
// In the line "flips alone" the assembler leaves most of them out, since nobody reads them.
#include "pack_products.cuh"

enum Mode { PRODUCTS, BOTH, FLIPS, HALF, SPARSE, SPARSE_ALONE, GROUP16_ALONE, GROUP16, GROUP8_ALONE, GROUP8 };

__device__ __forceinline__ void wgmma16(float (&c)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,1,1,1,0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma8(float (&c)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3},{%4,%5,%6,%7},%8,1,1,1,0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ uint32_t flipped(uint32_t weights, uint32_t top) {
  uint32_t out;
  asm volatile("lop3.b32 %0,%1,%2,0x80008000,0x78;" : "=r"(out) : "r"(weights), "r"(top));
  return out;
}

// The other pipe for half of the flips: 1 or -1, and a multiplication by it.
__device__ __forceinline__ uint32_t sign(uint32_t top) {
  uint32_t out;
  asm volatile("lop3.b32 %0,%1,0x80008000,0x3c003c00,0xea;" : "=r"(out) : "r"(top));
  return out;
}

__device__ __forceinline__ uint32_t times(uint32_t weights, uint32_t signs) {
  uint32_t out;
  asm volatile("mul.f16x2 %0,%1,%2;" : "=r"(out) : "r"(weights), "r"(signs));
  return out;
}

// TILES of eight samples, COPIES of the weights.
template <int MODE, int TILES, int COPIES>
__global__ void __launch_bounds__(MODE >= GROUP16_ALONE ? 256 : 512)
    slices(float* out, const uint4* source, int turns, long long* cycles) {
  extern __shared__ uint4 shared[];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) shared[i] = source[i];
  __syncthreads();
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float sums[COPIES][TILES][4], group_sums[COPIES][8];
  for (int v = 0; v < COPIES; v++) {
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) sums[v][n][i] = 0;
    for (int i = 0; i < 8; i++) group_sums[v][i] = 0;
  }
  uint32_t x[TILES][4];
  for (int n = 0; n < TILES; n++) {
    uint4 q = shared[(lane * 7 + n * 37) & 4095];
    x[n][0] = q.x, x[n][1] = q.y, x[n][2] = q.z, x[n][3] = q.w;
  }
  uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  uint64_t descriptor = ((base & 0x3ffff) >> 4) | ((uint64_t)(8) << 16) | ((uint64_t)(16) << 32);
  long long begin = clock64();
  uint32_t sink = 0;
#pragma unroll 4
  for (int turn = 0; turn < turns; turn++) {
    uint4 q = shared[((turn * 32) + lane + warp * 64) & 4095];
    uint32_t w[8][4] = {{q.x, q.y, q.z, q.w}};
    constexpr bool FLIP = MODE == BOTH || MODE == FLIPS || MODE == HALF || MODE == SPARSE || MODE == GROUP16 || MODE == GROUP8;
    if (FLIP) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint32_t s0 = w[0][i] << 15, s1 = w[0][i] << 14, s2 = w[0][i] << 13;
        w[1][i] = flipped(w[0][i], s0);
        w[2][i] = flipped(w[0][i], s1);
        w[3][i] = flipped(w[1][i], s1);
        if (COPIES == 8) {
          if (MODE == HALF) {
            uint32_t signs = sign(s2);
            w[4][i] = flipped(w[0][i], s2);
            for (int v = 5; v < 8; v++) w[v][i] = times(w[v - 4][i], signs);
          } else {
            for (int v = 4; v < 8; v++) w[v][i] = flipped(w[v - 4][i], s2);
          }
        }
      }
    } else {
      for (int v = 1; v < COPIES; v++)
        for (int i = 0; i < 4; i++) w[v][i] = w[0][i];
    }
    if (MODE == FLIPS) sink ^= w[0][0];
    if (MODE == PRODUCTS || MODE == BOTH || MODE == HALF) {
#pragma unroll
      for (int v = 0; v < COPIES; v++)
        for (int n = 0; n < TILES; n++) multiply(sums[v][n], w[v], x[n][0], x[n][1]);
    }
    if (MODE == SPARSE || MODE == SPARSE_ALONE) {
      uint32_t places = (q.x & 0x11111111) | 0x88888888;
#pragma unroll
      for (int v = 0; v < COPIES; v++)
        for (int n = 0; n < TILES; n++) multiply_sparse(sums[v][n], w[v], x[n], places);
    }
    if (MODE >= GROUP16_ALONE) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int v = 0; v < COPIES; v++) {
        if (MODE < GROUP8_ALONE)
          wgmma16(group_sums[v], w[v], descriptor);
        else
          wgmma8(group_sums[v], w[v], descriptor);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
  }
  if (MODE >= GROUP16_ALONE) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  long long end = clock64();
  float total = __uint_as_float(sink);
  for (int v = 0; v < COPIES; v++) {
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) total += sums[v][n][i];
    for (int i = 0; i < 8; i++) total += group_sums[v][i];
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = end - begin;
}

template <int MODE, int TILES, int COPIES>
void time(const char* name, float* out, uint4* source, long long* cycles) {
  CHECK(cudaFuncSetAttribute(slices<MODE, TILES, COPIES>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
  printf("%-34s", name);
  for (int warps : {4, 8, 12, 16}) {
    if (MODE >= GROUP16_ALONE && warps > 8) continue;
    int turns = 16384;
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    slices<MODE, TILES, COPIES><<<132, warps * 32, 65536>>>(out, source, turns, cycles);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventRecord(from));
    slices<MODE, TILES, COPIES><<<132, warps * 32, 65536>>>(out, source, turns, cycles);
    CHECK(cudaEventRecord(to));
    CHECK(cudaDeviceSynchronize());
    float milliseconds;
    CHECK(cudaEventElapsedTime(&milliseconds, from, to));
    long long taken;
    CHECK(cudaMemcpy(&taken, cycles, 8, cudaMemcpyDeviceToHost));
    printf("  %d warps: %6.1f cyc %5.2f GHz", warps / 4, (double)taken / turns / (warps / 4), taken / (milliseconds * 1e6));
  }
  printf("\n");
  fflush(stdout);
}

int main() {
  float* out;
  uint4* source = random_weights();
  long long* cycles;
  CHECK(cudaMalloc(&out, 132 * 512 * 4));
  CHECK(cudaMalloc(&cycles, 8));
  printf("memory at 4.15 TB/s leaves 512 B / (4.15e12/528/1.755e9) = 114 cycles per slice at 1.755 GHz\n");
  time<PRODUCTS, 1, 8>("8 products, batch 8", out, source, cycles);
  time<PRODUCTS, 2, 8>("16 products, batch 16", out, source, cycles);
  time<FLIPS, 1, 8>("flips alone", out, source, cycles);
  time<BOTH, 1, 8>("flips + 8 products", out, source, cycles);
  time<BOTH, 2, 8>("flips + 16 products", out, source, cycles);
  time<HALF, 1, 8>("flips/mul + 8 products", out, source, cycles);
  time<HALF, 2, 8>("flips/mul + 16 products", out, source, cycles);
  time<SPARSE_ALONE, 1, 4>("sparse: 4 products", out, source, cycles);
  time<SPARSE, 1, 4>("sparse: flips + 4 (batch<=4)", out, source, cycles);
  time<SPARSE, 2, 4>("sparse: flips + 8 (batch 8)", out, source, cycles);
  time<SPARSE_ALONE, 4, 4>("sparse: 16 products", out, source, cycles);
  time<SPARSE, 4, 4>("sparse: flips + 16 (batch 16)", out, source, cycles);
  time<GROUP16_ALONE, 1, 8>("wgmma n16 x 8", out, source, cycles);
  time<GROUP16, 1, 8>("flips + wgmma n16 x 8", out, source, cycles);
  time<GROUP8_ALONE, 1, 8>("wgmma n8 x 8", out, source, cycles);
  time<GROUP8, 1, 8>("flips + wgmma n8 x 8", out, source, cycles);
  time<PRODUCTS, 2, 4>("alpha 4: 8 products, batch 16", out, source, cycles);
  time<BOTH, 2, 4>("alpha 4: flips + 8 products", out, source, cycles);
  return 0;
}
