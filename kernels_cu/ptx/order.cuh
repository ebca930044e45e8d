// Marks for the compiler that cost nothing: on what stands in what order, and what is worked out where.
#pragma once

// This register changes here: what reads it is not moved up over a wait.
__device__ inline void mark_changed(float& x) { asm volatile("" : "+f"(x)::"memory"); }

// The same of an address: what is worked out of it is not held in registers from before here.
__device__ inline void mark_changed(unsigned& x) { asm volatile("" : "+r"(x)); }

// A hint: what is worked out of x in this loop the compiler then tends to leave there, and not to hold in registers
// from before it. (x counts as read here.)
__device__ inline void mark_read(int x) { asm volatile("" ::"r"(x)); }
