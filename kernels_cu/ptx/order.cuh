// Marks in the order of instructions that cost nothing: what the compiler must not move over them.
#pragma once

// This register changes here: what reads it is not moved up over a wait.
__device__ inline void mark_changed(float& x) { asm volatile("" : "+f"(x)::"memory"); }

// x, which is never negative, is needed here: what computes it is not moved down over a wait that follows.
__device__ inline void mark_needed(float x) {
    asm volatile("{ .reg .pred never; setp.lt.f32 never, %0, 0f00000000; @never nanosleep.u32 0; }" ::"f"(x) : "memory");
}
