// Twin of ptx/shared.cuh.
#pragma once

inline unsigned shared_address(const void* pointer) { return unsigned((const char*)pointer - on_cpu::me->block->memory); }

inline void store_shared(unsigned address, unsigned x) { on_cpu::shared<unsigned>(address) = x; }
inline unsigned load_shared(unsigned address) { return on_cpu::shared<unsigned>(address); }
inline unsigned short load_shared_u16(unsigned address) { return on_cpu::shared<unsigned short>(address); }
inline uint4 load_shared_16(unsigned address) { return on_cpu::shared<uint4>(address); }
inline float2 load_shared_float2(unsigned address) { return on_cpu::shared<float2>(address); }
inline void store_shared_16(unsigned address, const float (&x)[4]) {
    on_cpu::shared<float4>(address) = {x[0], x[1], x[2], x[3]};
}
