// Stores to global memory that the compiler must not take apart.
#pragma once

__device__ inline void store_global_16(void* address, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
