// A sign that depends on a comparison.
#pragma once

// x, or -x where word < below. Of a plain negation ptxas makes a select, on the pipe that comparisons keep busy.
__device__ inline void negate_below(float& x, unsigned word, unsigned below) {
    asm("{ .reg .pred p; setp.lt.u32 p, %1, %2; @p mul.f32 %0, %0, 0fBF800000; }" : "+f"(x) : "r"(word), "r"(below));
}

__device__ inline void negate_below(double& x, unsigned word, unsigned below) {
    x = __hiloint2double(__double2hiint(x) ^ (word < below ? 0x80000000 : 0), __double2loint(x));
}
