// What a warp of an H100 or H200 can do, one function for each instruction.
#pragma once

typedef unsigned int word;

struct words {
  word a, b, c, d;
};

// What is read once goes first when the cache is full.
struct Once {
  unsigned long long policy;

  __device__ __forceinline__ Once() {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }
};

// The kernel that comes next may send its blocks where this one's have ended; it too begins by waiting.
__device__ __forceinline__ void let_next_come() { asm volatile("griddepcontrol.launch_dependents;"); }

// Wait until all kernels before have ended. Nothing may be read or written sooner.
__device__ __forceinline__ void await_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Ask for so many bytes of memory; that is no reading, and may come too early.
__device__ __forceinline__ void want(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ word shared_at(const void* pointer) {
  word out;
  asm("{ .reg .u64 at; cvta.to.shared.u64 at, %1; cvt.u32.u64 %0, at; }" : "=r"(out) : "l"(pointer));
  return out;
}

// 16 bytes from memory to shared memory, behind the program's back; nobody will read them again.
__device__ __forceinline__ void copy(word to, const void* from, Once once) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from), "l"(once.policy)
               : "memory");
}

// The same for what others will read too; zeros where there is nothing.
__device__ __forceinline__ void copy_if(bool there, word to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most so many ends of copies are outstanding.
template <int MOST>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
  __syncwarp();
}

__device__ __forceinline__ words load(const void* from) {
  words w;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(w.a), "=r"(w.b), "=r"(w.c), "=r"(w.d)
               : "l"(from));
  return w;
}

__device__ __forceinline__ unsigned short load_one(const void* from) { return *(const unsigned short*)from; }

__device__ __forceinline__ void store_one(void* to, unsigned short number) { *(unsigned short*)to = number; }

__device__ __forceinline__ void load_pairs(word (&one)[1], const void* from) { one[0] = *(const word*)from; }

__device__ __forceinline__ void load_pairs(word (&two)[2], const void* from) {
  const uint2 found = *(const uint2*)from;
  two[0] = found.x, two[1] = found.y;
}

// The next layer will read this: it stays in the cache while weights pass through.
struct Later {
  unsigned long long policy;

  __device__ __forceinline__ Later() {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  }
};

__device__ __forceinline__ void store_for_later(void* to, const word (&one)[1]) {
  asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(to), "r"(one[0]), "l"(Later().policy)
               : "memory");
}

__device__ __forceinline__ void store_for_later(void* to, const word (&two)[2]) {
  asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1,%2}, %3;" ::"l"(to), "r"(two[0]), "r"(two[1]),
               "l"(Later().policy)
               : "memory");
}

__device__ __forceinline__ words load_shared(word from) {
  words w;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(w.a), "=r"(w.b), "=r"(w.c), "=r"(w.d)
               : "r"(from));
  return w;
}

__device__ __forceinline__ void store_shared(word to, word a, word b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_shared(word to, word a, word b, word c, word d) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Four 8 x 8 matrices, as the matrix units want them; lane l says where row l % 8 of matrix l / 8 is.
__device__ __forceinline__ words load_matrices(word from) {
  words w;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(w.a), "=r"(w.b), "=r"(w.c), "=r"(w.d)
               : "r"(from));
  return w;
}

#if BFLOAT16
#define KIND "bf16.bf16"
#else
#define KIND "f16.f16"
#endif

// sums += A B, for A of 16 x 16 and B of 16 x 8.
__device__ __forceinline__ void multiply(float (&sums)[4], words a, word b0, word b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND
               ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a.a), "r"(a.b), "r"(a.c), "r"(a.d), "r"(b0), "r"(b1));
}

// sums += A B, for A of 16 x 32 with two of every four columns empty, and B of 32 x 8. Lanes 0 and 1
// of every four, or 2 and 3 if UPPER, hold the places of the others.
template <bool UPPER>
__device__ __forceinline__ void multiply(float (&sums)[4], words a, words b, word places) {
  asm volatile("mma.sp.sync.aligned.m16n8k32.row.col.f32." KIND
               ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9,%10,%11},{%0,%1,%2,%3},%12,%13;"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a.a), "r"(a.b), "r"(a.c), "r"(a.d), "r"(b.a), "r"(b.b), "r"(b.c), "r"(b.d),
                 "r"(places), "n"(UPPER ? 1 : 0));
}

// first ^ (second & third), (first & second) | third, and first where third is set, else second.
__device__ __forceinline__ word xor_some(word first, word second, word third) {
  word out;
  asm("lop3.b32 %0,%1,%2,%3,0x78;" : "=r"(out) : "r"(first), "r"(second), "r"(third));
  return out;
}

__device__ __forceinline__ word or_some(word first, word second, word third) {
  word out;
  asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(out) : "r"(first), "r"(second), "r"(third));
  return out;
}

__device__ __forceinline__ word choose(word first, word second, word third) {
  word out;
  asm("lop3.b32 %0,%1,%2,%3,0xe4;" : "=r"(out) : "r"(first), "r"(second), "r"(third));
  return out;
}

// A number the compiler is not to make anew each time it is needed.
__device__ __forceinline__ word pinned(word number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Two sums as a pair of weights, and the other way round for one.
__device__ __forceinline__ word rounded(float first, float second) {
  word out;
#if BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0,%2,%1;" : "=r"(out) : "f"(first), "f"(second));
#else
  asm("cvt.rn.f16x2.f32 %0,%2,%1;" : "=r"(out) : "f"(first), "f"(second));
#endif
  return out;
}

__device__ __forceinline__ float widened(unsigned short number) {
#if BFLOAT16
  return __uint_as_float((word)number << 16);
#else
  float out;
  asm("cvt.f32.f16 %0,%1;" : "=f"(out) : "h"(number));
  return out;
#endif
}

// A gate opens when so many warps have come to it, and is then for the next round.
__device__ __forceinline__ void make_gate(word gate, int warps) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(gate), "r"(warps) : "memory");
}

__device__ __forceinline__ void come(word gate, int lane) {
  __syncwarp();
  if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(gate) : "memory");
}

__device__ __forceinline__ void await(word gate, word round) {
  asm volatile(
      "{ .reg .pred open;\n"
      "AGAIN%=: mbarrier.try_wait.parity.shared.b64 open, [%0], %1;\n"
      "@!open bra AGAIN%=; }" ::"r"(gate),
      "r"(round & 1)
      : "memory");
}
