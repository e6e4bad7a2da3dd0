// What pack_cycles.cu and pack_overlap.cu share: products on the matrix units, and weights for them.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_fp16.h>

#define CHECK(call)                                                   \
  do {                                                                \
    cudaError_t error = (call);                                       \
    if (error) {                                                      \
      printf("%s: %s\n", #call, cudaGetErrorString(error));           \
      exit(1);                                                        \
    }                                                                 \
  } while (0)

// c += A B, for A of 16 x 16 weights and B of 16 x 8 inputs.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One bit of the owner as the place of a weight among twice as many inputs: 2:4 sparse products.
__device__ __forceinline__ void multiply_sparse(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                                uint32_t places) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9,%10,%11},{%0,%1,%2,%3},%12,0x0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(places));
}

// 64 KiB of weights, nearly normal.
inline uint4* random_weights() {
  static __half weights[32768];
  srand(1);
  for (int i = 0; i < 32768; i++) {
    float u = 0;
    for (int j = 0; j < 12; j++) u += rand() / (float)RAND_MAX;
    weights[i] = __float2half((u - 6) * 0.02f);
  }
  uint4* copied;
  CHECK(cudaMalloc(&copied, sizeof weights));
  CHECK(cudaMemcpy(copied, weights, sizeof weights, cudaMemcpyHostToDevice));
  return copied;
}
