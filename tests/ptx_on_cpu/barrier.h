// Twin of ptx/barrier.cuh.
#pragma once

inline const char* barrier_name(int number) {
    static const char* const names[16] = {
        "barrier 0", "barrier 1", "barrier 2",  "barrier 3",  "barrier 4",  "barrier 5",  "barrier 6",  "barrier 7",
        "barrier 8", "barrier 9", "barrier 10", "barrier 11", "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
    if (number < 0 || number > 15) on_cpu::fail("there is no barrier %d", number);
    return names[number];
}

template <int THREADS>
bool all_threads(int number, bool yes) {
    static_assert(THREADS % 32 == 0);
    const char* name = barrier_name(number);
    return on_cpu::meet(on_cpu::me->block->barriers[number], THREADS, name, yes);
}

template <int THREADS>
void arrive_threads(int number) {
    static_assert(THREADS % 32 == 0);
    const char* name = barrier_name(number);
    on_cpu::arrive(on_cpu::me->block->barriers[number], THREADS, name);
}

template <int THREADS>
void sync_threads(int number) {
    all_threads<THREADS>(number, true);
}
