// Twin of ptx/shared.cuh.
#pragma once

inline unsigned shared_address(const void* pointer) {
    return on_cpu::address_in(*on_cpu::me->block, (const char*)pointer - on_cpu::me->block->memory);
}

inline void store_shared(unsigned address, unsigned x) {
    on_cpu::shared<unsigned>(address) = x;
    on_cpu::note_store(*on_cpu::me->block, address, 4, threadIdx.x);
}
inline unsigned load_shared(unsigned address) { return on_cpu::shared<unsigned>(address); }
inline unsigned load_shared_u8(unsigned address) { return on_cpu::shared<unsigned char>(address); }
inline unsigned short load_shared_u16(unsigned address) { return on_cpu::shared<unsigned short>(address); }
inline uint4 load_shared_16(unsigned address) { return on_cpu::shared<uint4>(address); }
inline float2 load_shared_float2(unsigned address) { return on_cpu::shared<float2>(address); }
inline void store_shared_16(unsigned address, const float (&x)[4]) {
    on_cpu::shared<float4>(address) = {x[0], x[1], x[2], x[3]};
    on_cpu::note_store(*on_cpu::me->block, address, 16, threadIdx.x);
}

inline void store_shared_16(unsigned address, uint4 x) { on_cpu::shared<uint4>(address) = x; }
inline void store_shared_number(unsigned address, float x) { store_shared(address, __float_as_uint(x)); }
inline void store_shared_number(unsigned address, double x) {
    on_cpu::shared<double>(address) = x;
    on_cpu::note_store(*on_cpu::me->block, address, 8, threadIdx.x);
}
inline void store_shared_double2(unsigned address, double x, double y) {
    on_cpu::shared<double2>(address) = {x, y};
    on_cpu::note_store(*on_cpu::me->block, address, 16, threadIdx.x);
}
inline double load_shared_double(unsigned address) { return on_cpu::shared<double>(address); }
inline double2 load_shared_double2(unsigned address) { return on_cpu::shared<double2>(address); }
inline float load_shared_number(unsigned address, float) { return on_cpu::shared<float>(address); }
inline double load_shared_number(unsigned address, double) { return on_cpu::shared<double>(address); }
template <class T>
auto load_shared_pair(unsigned address) {
    if constexpr (sizeof(T) == 8)
        return load_shared_double2(address);
    else
        return load_shared_float2(address);
}
