// Ordinary loads and stores of shared memory by 32-bit address: generic pointers cost twice the integer arithmetic.
#pragma once

__device__ inline unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

__device__ inline void store_shared(unsigned address, unsigned x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ inline unsigned load_shared(unsigned address) {
    unsigned x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ inline unsigned load_shared_u8(unsigned address) {
    unsigned x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ inline unsigned short load_shared_u16(unsigned address) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}

__device__ inline uint4 load_shared_16(unsigned address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address)
                 : "memory");
    return x;
}

__device__ inline float2 load_shared_float2(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ inline void store_shared_16(unsigned address, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

__device__ inline void store_shared_16(unsigned address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ inline void store_shared_number(unsigned address, float x) { store_shared(address, __float_as_uint(x)); }
__device__ inline void store_shared_number(unsigned address, double x) {
    asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(x) : "memory");
}

__device__ inline void store_shared_double2(unsigned address, double x, double y) {
    asm volatile("st.shared.v2.f64 [%0], {%1,%2};" ::"r"(address), "d"(x), "d"(y) : "memory");
}

__device__ inline double load_shared_double(unsigned address) {
    double x;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address) : "memory");
    return x;
}

__device__ inline double2 load_shared_double2(unsigned address) {
    double2 x;
    asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];" : "=d"(x.x), "=d"(x.y) : "r"(address) : "memory");
    return x;
}

// One of T.
__device__ inline float load_shared_number(unsigned address, float) { return __uint_as_float(load_shared(address)); }
__device__ inline double load_shared_number(unsigned address, double) { return load_shared_double(address); }

// Two numbers of T side by side.
template <class T>
__device__ auto load_shared_pair(unsigned address) {
    if constexpr (sizeof(T) == 8)
        return load_shared_double2(address);
    else
        return load_shared_float2(address);
}
