// Twin of ptx/flag.cuh.
#pragma once

template <class T>
T load_acquire(const T* address) {
    on_cpu::spin("load_acquire");
    return *(const volatile T*)address;
}
inline void store_release(unsigned long long* address, unsigned long long x) {
    *address = x;
    on_cpu::release("store_release");
}
inline void add_release(unsigned* address, unsigned x) {
    *address += x;
    on_cpu::release("add_release");
}
