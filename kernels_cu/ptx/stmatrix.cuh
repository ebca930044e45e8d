// A warp stores four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
#pragma once

__device__ inline void stmatrix_x4(unsigned address, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

// The same with each matrix transposed: the addresses are those of its columns.
__device__ inline void stmatrix_x4_transposed(unsigned address, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Two matrices; lanes 0 to 15 give the addresses.
__device__ inline void stmatrix_x2_transposed(unsigned address, unsigned r0, unsigned r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r0), "r"(r1)
                 : "memory");
}
