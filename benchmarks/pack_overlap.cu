// What a scheduler of an H100 or H200 does beside products on the matrix units, memory left aside.
//
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o pack_overlap benchmarks/pack_overlap.cu
//     ./pack_overlap
//
// Eight products of 16 x 16 weights and eight samples, and among them so many instructions of a kind,
// none of which waits for another. Prints cycles for each eight products, by the number of warps that
// share a scheduler. Eight products take 49 cycles; with others beside them at least five each, and at
// least one each other instruction, two if all are of a kind that has half of the lanes. The last line is a packed layer of eight children: every flipped copy is made
// two products before it is multiplied, where pack_cycles.cu leaves the order to the compiler.
#include "pack_products.cuh"

typedef uint32_t word;
enum Products { NO_PRODUCTS, FULL, SPARSE };
enum Other { NOTHING, LOGIC, INTEGER, HALVES, FLOATS, MIXED };  // MIXED: logic and integers in turn

template <int OTHER>
__device__ __forceinline__ void other(word& r, word s, int i) {
  if (OTHER == LOGIC) asm volatile("lop3.b32 %0,%0,%1,0x80008000,0x78;" : "+r"(r) : "r"(s));
  if (OTHER == INTEGER) asm volatile("mad.lo.u32 %0,%0,%1,%0;" : "+r"(r) : "r"(s));
  if (OTHER == HALVES) asm volatile("fma.rn.f16x2 %0,%0,%1,%0;" : "+r"(r) : "r"(s));
  if (OTHER == FLOATS)
    asm volatile("{.reg .f32 f,g; mov.b32 f,%0; mov.b32 g,%1; fma.rn.f32 f,f,g,f; mov.b32 %0,f;}" : "+r"(r) : "r"(s));
  if (OTHER == MIXED) {
    if (i & 1)
      other<LOGIC>(r, s, i);
    else
      other<INTEGER>(r, s, i);
  }
}

template <int PRODUCTS, int OTHER, int MANY>
__global__ void __launch_bounds__(512) beside(float* out, const uint4* source, int turns, long long* cycles) {
  extern __shared__ uint4 shared[];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) shared[i] = source[i];
  __syncthreads();
  int lane = threadIdx.x & 31;
  word w[8][4], x[4], r[16];
  float sums[8][4];
  for (int v = 0; v < 8; v++) {
    uint4 q = shared[(lane + v * 32) & 4095];
    w[v][0] = q.x, w[v][1] = q.y, w[v][2] = q.z, w[v][3] = q.w;
    for (int i = 0; i < 4; i++) sums[v][i] = 0;
  }
  uint4 q = shared[(lane * 7 + 37) & 4095];
  x[0] = q.x, x[1] = q.y, x[2] = q.z, x[3] = q.w;
  for (int i = 0; i < 16; i++) r[i] = ((word*)shared)[lane + 32 * i];
  word s = ((word*)shared)[lane * 3 + 1000], places = (x[0] & 0x11111111) | 0x88888888;
  long long begin = clock64();
#pragma unroll 2
  for (int turn = 0; turn < turns; turn++) {
#pragma unroll
    for (int v = 0; v < 8; v++) {
      if (PRODUCTS == FULL) multiply(sums[v], w[v], x[0], x[1]);
      if (PRODUCTS == SPARSE) multiply_sparse(sums[v], w[v], x, places);
#pragma unroll
      for (int i = MANY * v / 8; i < MANY * (v + 1) / 8; i++) other<OTHER>(r[i & 15], s, i);
    }
  }
  long long end = clock64();
  float total = 0;
  for (int v = 0; v < 8; v++)
    for (int i = 0; i < 4; i++) total += sums[v][i];
  for (int i = 0; i < 16; i++) total += __uint_as_float(r[i]);
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = end - begin;
}

__device__ __forceinline__ void flip(word (&to)[4], const word (&w)[4], const word (&tops)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("lop3.b32 %0,%1,%2,0x80008000,0x78;" : "=r"(to[i]) : "r"(w[i]), "r"(tops[i]));
}

template <int BY>
__device__ __forceinline__ void shift(word (&to)[4], const word (&w)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("shl.b32 %0,%1,%2;" : "=r"(to[i]) : "r"(w[i]), "n"(BY));
}

__global__ void __launch_bounds__(512) layer(float* out, const uint4* source, int turns, long long* cycles) {
  extern __shared__ uint4 shared[];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) shared[i] = source[i];
  __syncthreads();
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float sums[8][4];
  for (int v = 0; v < 8; v++)
    for (int i = 0; i < 4; i++) sums[v][i] = 0;
  uint4 p = shared[(lane * 7 + 37) & 4095], q = shared[lane + warp * 64];
  word x[2] = {p.x, p.y};
  long long begin = clock64();
#pragma unroll 4
  for (int turn = 0; turn < turns; turn++) {
    word f[8][4] = {{q.x, q.y, q.z, q.w}}, s[3][4];
    q = shared[((turn * 32) + 32 + lane + warp * 64) & 4095];
    shift<15>(s[0], f[0]);
    flip(f[1], f[0], s[0]), shift<14>(s[1], f[0]);
    flip(f[3], f[1], s[1]);
    multiply(sums[0], f[0], x[0], x[1]);
    flip(f[2], f[0], s[1]), shift<13>(s[2], f[0]);
    multiply(sums[1], f[1], x[0], x[1]);
    flip(f[6], f[2], s[2]);
    multiply(sums[3], f[3], x[0], x[1]);
    flip(f[7], f[6], s[0]);
    multiply(sums[2], f[2], x[0], x[1]);
    flip(f[5], f[1], s[2]);
    multiply(sums[6], f[6], x[0], x[1]);
    flip(f[4], f[0], s[2]);
    multiply(sums[7], f[7], x[0], x[1]);
    multiply(sums[5], f[5], x[0], x[1]);
    multiply(sums[4], f[4], x[0], x[1]);
  }
  long long end = clock64();
  float total = 0;
  for (int v = 0; v < 8; v++)
    for (int i = 0; i < 4; i++) total += sums[v][i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = end - begin;
}

float* out;
uint4* source;
long long* cycles;

template <typename Kernel>
void time(const char* name, Kernel* kernel) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
  printf("%-34s", name);
  for (int warps : {4, 8, 12, 16}) {
    int turns = 4096;
    for (int again = 0; again < 2; again++) {
      kernel<<<132, warps * 32, 65536>>>(out, source, turns, cycles);
      CHECK(cudaDeviceSynchronize());
    }
    long long taken;
    CHECK(cudaMemcpy(&taken, cycles, 8, cudaMemcpyDeviceToHost));
    printf("  %d warps: %6.1f", warps / 4, (double)taken / turns / (warps / 4));
  }
  printf("\n");
  fflush(stdout);
}

int main() {
  source = random_weights();
  CHECK(cudaMalloc(&out, 132 * 512 * 4));
  CHECK(cudaMalloc(&cycles, 8));
  time("8 products", beside<FULL, NOTHING, 0>);
  time("8 sparse products", beside<SPARSE, NOTHING, 0>);
  time("40 logic", beside<NO_PRODUCTS, LOGIC, 40>);
  time("40 mixed", beside<NO_PRODUCTS, MIXED, 40>);
  time("8 products, 8 logic", beside<FULL, LOGIC, 8>);
  time("8 products, 16 logic", beside<FULL, LOGIC, 16>);
  time("8 products, 24 logic", beside<FULL, LOGIC, 24>);
  time("8 products, 40 logic", beside<FULL, LOGIC, 40>);
  time("8 products, 24 integer", beside<FULL, INTEGER, 24>);
  time("8 products, 40 integer", beside<FULL, INTEGER, 40>);
  time("8 products, 24 halves", beside<FULL, HALVES, 24>);
  time("8 products, 40 halves", beside<FULL, HALVES, 40>);
  time("8 products, 24 floats", beside<FULL, FLOATS, 24>);
  time("8 products, 40 floats", beside<FULL, FLOATS, 40>);
  time("8 products, 24 mixed", beside<FULL, MIXED, 24>);
  time("8 products, 40 mixed", beside<FULL, MIXED, 40>);
  time("8 sparse products, 24 mixed", beside<SPARSE, MIXED, 24>);
  time("8 sparse products, 40 mixed", beside<SPARSE, MIXED, 40>);
  time("a layer of 8 children, 8 samples", layer);
  return 0;
}
