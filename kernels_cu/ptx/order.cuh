// Marks in the order of instructions that cost nothing: what the compiler must not move over them.
#pragma once

// This register changes here: what reads it is not moved up over a wait.
__device__ inline void mark_changed(float& x) { asm volatile("" : "+f"(x)::"memory"); }
