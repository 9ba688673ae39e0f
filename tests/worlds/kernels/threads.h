// The threads of a GPU's group, which take turns on one CPU: each runs until it has to wait for others. Groups run one
// after another, and their threads in rising and in falling order by turns, so that a missing barrier shows.
#pragma once
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

// What a kernel's text becomes: all that one thread of a group does.
static void body(void** given, int group, int thread);

// A thread's stack is made once; jumps between stacks need no call of the system, as `swapcontext` does.
static struct Thread { ucontext_t start; jmp_buf place; bool begun, done; } threads[1024];
static jmp_buf outside;
static void** pointers;
static int group_now, running, count;
static long steps;

static __attribute__((noinline)) void leave() {
  if (!_setjmp(threads[running].place)) _longjmp(outside, 1);
}
static __attribute__((noinline)) void enter(int thread) {
  running = thread;
  if (_setjmp(outside)) return;
  if (threads[thread].begun) _longjmp(threads[thread].place, 1);
  threads[thread].begun = true;
  setcontext(&threads[thread].start);
}
static void live() {
  while (true) {
    body(pointers, group_now, running);
    threads[running].done = true;
    steps++;
    leave();
  }
}

struct Meeting { int arrived, round; };
static Meeting of_group, of_warps[32];
static void wait_for(Meeting& meeting, int all) {
  const int mine = meeting.round;
  steps++;
  if (++meeting.arrived == all) { meeting.arrived = 0; meeting.round++; return; }
  while (meeting.round == mine) leave();
}
static bool trapped;
static void __trap() { trapped = true; }
static void wait_for_group() { wait_for(of_group, count); }
static void wait_for_warp() {
  const int first = running & ~31;
  wait_for(of_warps[running >> 5], count - first < 32 ? count - first : 32);
}

// Returns 1 if threads wait for others that never come, 2 after a trap.
extern "C" int launch(void** given, int groups, int size) {
  constexpr int STACK = 1 << 16;
  static char stacks[1024][STACK];
  pointers = given, count = size, trapped = false;
  for (int i = 0; i < count; i++) {
    getcontext(&threads[i].start);
    threads[i].start.uc_stack.ss_sp = stacks[i];
    threads[i].start.uc_stack.ss_size = STACK;
    threads[i].begun = false;
    makecontext(&threads[i].start, live, 0);
  }
  // The last first: a group that needs what one before it writes is wrong on a GPU.
  for (group_now = groups - 1; group_now >= 0; group_now--) {
    of_group = {};
    memset(of_warps, 0, sizeof of_warps);
    for (int i = 0; i < count; i++) threads[i].done = false;
    for (bool left = true; left;) {
      left = false;
      const long before = steps;
      for (int i = 0; i < count; i++) {
        const int thread = group_now & 1 ? count - 1 - i : i;
        if (!threads[thread].done) { left = true; enter(thread); }
      }
      if (left && steps == before) return 1;
    }
  }
  return trapped ? 2 : 0;
}
