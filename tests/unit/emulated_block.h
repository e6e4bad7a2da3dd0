// The threads of a CUDA block on a processor, for g++.
//
// Every thread is a fiber. It runs until it has to wait for others, and a scheduler picks who goes
// on. A seed decides which warps lag behind, and when copies happen: at once, at the last moment,
// or each as it comes. Whatever a GPU would refuse or leave undefined ends the launch with a
// message.
#pragma once
#undef _FORTIFY_SOURCE  // its longjmp refuses to go to another stack

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

typedef unsigned int word;

struct words {
  word a, b, c, d;
};

constexpr int LANES = 32, MOST_WARPS = 32, STACK = 1 << 15;
constexpr word SHARED_FROM = 1024;    // the address of the first byte of shared memory
constexpr word MOST_SHARED = 232448;  // bytes a block of an H100 may have
constexpr word GUARD = 1024;          // bytes after them that nobody may write
constexpr unsigned char UNWRITTEN = 0xff, UNTOUCHED = 0xa5;  // the first makes NaNs of every kind

alignas(1024) unsigned char memory[MOST_SHARED + GUARD];

struct {
  int x;
} threadIdx, blockIdx, blockDim, gridDim;

// What threads wait for: that these bits of a word are not these any more.
struct Wait {
  const word* at;
  word mask, value;

  bool over() const { return !at || (*at & mask) != value; }
};

struct Copy {
  word to;
  const void* from;  // nullptr for zeros
  int group;
};

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  Wait wait;
  bool started, done, may_read;
  int group, copies;
  Copy pending[64];
};

// Where threads meet. What one gives, another may take when all have come.
struct Meeting {
  const char* what;
  word came, round;
};

struct Lane {
  word given[9], taken[4];
  float* sums;
};

struct Warp {
  Meeting meeting;
  Lane lanes[LANES];
  word lag;  // of 256 turns it is passed over in so many
};

struct Range {
  const unsigned char* from;
  size_t bytes;
};

static Fiber fibers[MOST_WARPS * LANES];
static unsigned char* stacks;
static Warp warps[MOST_WARPS];
static Meeting everyone;
static Range ranges[8];
static int known_ranges;
static jmp_buf scheduler;
static bool in_fiber;
static word shared_bytes;
static word copies_are;  // 0: at once, 1: at the last moment, 2: one or the other by chance
static uint64_t chance;
static char message[256];
static void (*kernel)(void*);
static void* arguments;

static Fiber& self() { return fibers[threadIdx.x]; }
static Warp& own_warp() { return warps[threadIdx.x / LANES]; }
static Lane& own_lane() { return own_warp().lanes[threadIdx.x % LANES]; }

static word random_word() {
  chance = chance * 6364136223846793005u + 1442695040888963407u;
  return (word)(chance >> 40);
}

// Say what is wrong, and end the launch.
__attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
  char what[160];
  va_list values;
  va_start(values, format);
  vsnprintf(what, sizeof what, format, values);
  va_end(values);
  if (!message[0])
    snprintf(message, sizeof message, "block %d, warp %d, lane %d: %s", blockIdx.x,
             threadIdx.x / LANES, threadIdx.x % LANES, what);
  if (in_fiber) _longjmp(scheduler, 1);
}

__attribute__((noinline)) static void pause_fiber() {
  if (!_setjmp(self().here)) _longjmp(scheduler, 1);
}

static void wait_while(const word* at, word mask, word value) {
  self().wait = {at, mask, value};
  while (!self().wait.over()) pause_fiber();
}

// Wait for all others; the last to come does what is to be done.
static void meet(Meeting& meeting, word of, const char* what, void (*act)()) {
  if (meeting.came && strcmp(meeting.what, what)) fail("%s, where others %s", what, meeting.what);
  meeting.what = what;
  if (++meeting.came < of) return wait_while(&meeting.round, ~0u, meeting.round);
  if (act) act();
  meeting.came = 0;
  meeting.round++;
}

static unsigned char* shared(word at, word bytes, word aligned, const char* what) {
  const word offset = at - SHARED_FROM;
  if (at < SHARED_FROM || offset > shared_bytes || bytes > shared_bytes - offset)
    fail("%s outside of shared memory, at byte %d", what, (int)offset);
  if (at % aligned) fail("%s of shared memory not aligned, at byte %d", what, (int)offset);
  return memory + offset;
}

static void check_known(const void* at, size_t bytes, size_t aligned, const char* what) {
  const uintptr_t begin = (uintptr_t)at;
  if (begin % aligned) fail("%s not aligned", what);
  for (int i = 0; i < known_ranges; i++) {
    const uintptr_t from = (uintptr_t)ranges[i].from;
    if (begin >= from && begin - from <= ranges[i].bytes &&
        bytes <= ranges[i].bytes - (begin - from))
      return;
  }
  fail("%s outside of every array", what);
}

// Reading or writing what was not allowed, or too early, is an error, be it mapped or not.
static void check_range(const void* at, size_t bytes, size_t aligned, const char* what) {
  if (!self().may_read) fail("%s before other kernels have ended", what);
  check_known(at, bytes, aligned, what);
}

static void perform(const Copy& copy) {
  unsigned char* const to = shared(copy.to, 16, 16, "copy");
  if (copy.from) memcpy(to, copy.from, 16);
  else memset(to, 0, 16);
}

// Perform the copies of groups before one of that number.
static void perform_before(int group) {
  Fiber& fiber = self();
  int kept = 0;
  for (int i = 0; i < fiber.copies; i++) {
    if (fiber.pending[i].group < group) perform(fiber.pending[i]);
    else fiber.pending[kept++] = fiber.pending[i];
  }
  fiber.copies = kept;
}

static void enter() {
  kernel(arguments);
  perform_before(self().group + 1);
  self().done = true;
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) static void resume(int thread) {
  threadIdx.x = thread;
  if (_setjmp(scheduler)) {
    in_fiber = false;
    return;
  }
  in_fiber = true;
  Fiber& fiber = fibers[thread];
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

static void prepare(int thread) {
  Fiber& fiber = fibers[thread];
  fiber.wait = {}, fiber.group = fiber.copies = 0;
  fiber.started = fiber.done = fiber.may_read = false;
  unsigned char* const stack = stacks + (size_t)thread * STACK;
  memset(stack, UNTOUCHED, 64);
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stack;
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, enter, 0);
}

static bool can_go_on(const Fiber& fiber) { return !fiber.done && fiber.wait.over(); }

static bool anyone_can() {
  for (int thread = 0; thread < blockDim.x; thread++)
    if (can_go_on(fibers[thread])) return true;
  return false;
}

// Let every thread of a warp that can go on do so; return how many did.
static int run_warp(int warp, int& left) {
  const int from = random_word() % LANES;
  int ran = 0;
  for (int i = 0; i < LANES && !message[0]; i++) {
    const int thread = warp * LANES + (from + i) % LANES;
    if (!can_go_on(fibers[thread])) continue;
    resume(thread);
    ran++;
    left -= fibers[thread].done;
  }
  return ran;
}

static bool untouched(const unsigned char* from, int bytes) {
  while (bytes && from[bytes - 1] == UNTOUCHED) bytes--;
  return !bytes;
}

static void run_block() {
  const int count = blockDim.x / LANES;
  memset(memory, UNWRITTEN, shared_bytes);
  memset(memory + shared_bytes, UNTOUCHED, GUARD);
  everyone = {};
  for (int warp = 0; warp < count; warp++) {
    constexpr word LAGS[4] = {0, 128, 240, 240};
    warps[warp].meeting = {};
    warps[warp].lag = LAGS[random_word() & 3];
  }
  for (int thread = 0; thread < blockDim.x; thread++) prepare(thread);
  for (int left = blockDim.x; left && !message[0];) {
    int ran = 0;
    for (int warp = 0; warp < count && !message[0]; warp++)
      if ((random_word() & 255) >= warps[warp].lag) ran += run_warp(warp, left);
    if (!ran && !anyone_can()) fail("all threads wait");
  }
  for (int thread = 0; thread < blockDim.x; thread++)
    if (!untouched(stacks + (size_t)thread * STACK, 64)) fail("the stack of a fiber is too small");
  if (!untouched(memory + shared_bytes, GUARD)) fail("written behind shared memory");
}

// A thread that reads or writes nowhere ends the launch, not the process.
static void on_fault(int number) {
  if (!in_fiber) signal(number, SIG_DFL);
  else fail("an address of nowhere");
}

struct Faults {
  struct sigaction segment, bus;

  Faults() {
    struct sigaction action = {};
    action.sa_handler = on_fault;
    action.sa_flags = SA_NODEFER;  // it is left by a jump
    sigaction(SIGSEGV, &action, &segment);
    sigaction(SIGBUS, &action, &bus);
  }
  ~Faults() {
    sigaction(SIGSEGV, &segment, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
  }
};

// Run a kernel; 0, or -1 where something was wrong.
template <class Body>
static int launched(int blocks, int threads, int bytes, word seed, Body body) {
  message[0] = 0;
  if (threads % LANES || threads > MOST_WARPS * LANES || bytes < 0 || (word)bytes > MOST_SHARED) {
    fail("no such launch");
    return -1;
  }
  stacks = (unsigned char*)malloc((size_t)STACK * MOST_WARPS * LANES);
  kernel = [](void* it) { (*(Body*)it)(); };
  arguments = &body;
  shared_bytes = (word)bytes, copies_are = seed % 3, chance = (seed + 1) * 0x9e3779b97f4a7c15u;
  blockDim.x = threads, gridDim.x = blocks;
  const Faults caught;
  for (blockIdx.x = 0; blockIdx.x < blocks && !message[0]; blockIdx.x++) run_block();
  free(stacks);
  return message[0] ? -1 : 0;
}

// An array the next launches may use, or all of those forgotten.
EXPORTED void allow(const void* from, size_t bytes) {
  if (known_ranges < 8) ranges[known_ranges++] = {(const unsigned char*)from, bytes};
}
EXPORTED void forget() { known_ranges = 0; }
EXPORTED const char* trouble() { return message; }
