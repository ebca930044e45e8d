// Just enough of CUDA to run kernels as C++ on the CPU. Threads are fibers that take turns, each until it must wait for
// others; so do warps, and the blocks in flight. In one order the first come first, and what the hardware does in the
// background happens at once. In the other the last come first, warps and blocks pause (at random, but always alike),
// and the hardware takes until it is waited for, or not: a forgotten barrier or wait shows in one of the two. Shared
// memory is NaN before each block, so that what is read before it is written shows too.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Index {
    unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;

namespace on_cpu {

using Work = std::function<void()>;

// What a thread, or a warp, has asked for and not yet waited for, in groups.
struct Background {
    std::vector<Work> open;
    std::deque<std::vector<Work>> groups;

    void add(Work work);
    void commit() { groups.push_back(std::move(open)), open.clear(); }
    // Until at most `pending` groups are under way.
    void finish(size_t pending) {
        for (; groups.size() > pending; groups.pop_front())
            for (auto& work : groups.front()) work();
    }
};

struct Barrier {
    unsigned arrived = 0, generation = 0;
    const char* at = nullptr;
    bool all = true, result = true;
};

struct Warp {
    unsigned arrived = 0, generation = 0;
    const char* at = nullptr;
    void* given[32];
    Background products;
    bool fenced = false;                    // since the last group of them
    std::map<const float*, int> under_way;  // of products, by lane 0's sum
};

struct Block;

// What threads store in shared memory, TMA and the tensor cores may read after a fence: of the thread that
// stored it, or of the one that asks for the reading.
struct Stored {
    unsigned long long when = 0;  // 0: nothing that was not fenced
    unsigned by = 0;
};

struct Read {
    Work now;
    std::shared_ptr<bool> done;
};

struct Fiber {
    jmp_buf state;
    bool started, done, spins;
    bool (*ready)(const void*);
    const void* condition;
    const char* at;
    unsigned detail[2];
    unsigned thread;
    Block* block;
    Background copies, stores;
    unsigned long long fence;      // when it last made shared memory known to TMA and the tensor cores
    std::vector<unsigned> stored;  // what it has stored there since, in 16 bytes
    std::vector<Read> reads;       // of shared memory, by what `stores` has
};

struct Block {
    unsigned number = 0, rank = 0, left = 0;  // left: threads that are not done
    Block* cluster = nullptr;                 // its first block
    char* memory = nullptr;                   // shared memory; an address is an offset into it
    Barrier barriers[16], whole_cluster;
    Warp warps[32];
    std::vector<Stored> stored;  // by 16 bytes of shared memory
    std::vector<bool> landing;   // by 4 bytes: a copy that nobody waited for yet will be written there
    std::unique_ptr<Fiber[]> fibers;
};

// Addresses of shared memory: what a launch asks for, a guard, and variables of fixed size.
constexpr unsigned FIXED = 256 << 10, FIXED_COUNT = 4, MEMORY = FIXED + FIXED_COUNT * (48 << 10);

struct Launch {
    unsigned grid, threads, cluster, in_flight, shared_start, shared_bytes;
    bool last_first;  // and what happens in the background happens late
};
extern Launch now;

extern Fiber* me;
extern char* dynamic_shared;    // of the block whose thread runs
extern std::vector<Work> late;  // what the hardware is about to do, by itself

// Runs the kernel on every block of the grid, `in_flight` at a time. Returns what went wrong, or null.
const char* launch(Work kernel, const Launch& how);

// Ends the launch.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

void leave();  // let the others run

inline void Background::add(Work work) {
    if (now.last_first)
        open.push_back(std::move(work));
    else
        work();
}

// Something that happens in the background by itself, sooner or later.
unsigned random_below(unsigned n);
inline void in_background(Work work) {
    if (now.last_first && random_below(2))
        late.push_back(std::move(work));
    else
        work();
}

// Let the others run until ready() says so.
template <class F>
void wait_until(const char* at, F ready, unsigned detail = 0, unsigned detail2 = 0) {
    if (ready()) return;
    me->at = at, me->detail[0] = detail, me->detail[1] = detail2;
    me->ready = [](const void* f) { return (*(const F*)f)(); };
    me->condition = &ready;
    leave();
    me->ready = nullptr;
}

// A look at memory that others write to: a loop of these must let them run.
inline void spin(const char* at) {
    me->at = at, me->spins = true;
    leave();
}

// What was done before is seen by others, perhaps at once.
inline void release(const char* at) {
    if (now.last_first) spin(at);
}

inline Warp& my_warp() { return me->block->warps[me->thread / 32]; }

// The lanes of a warp meet, and the last one does `work(given)` with what each has given.
template <class X, class F>
void together(const char* at, X& mine, F work) {
    Warp& warp = my_warp();
    if (warp.arrived && warp.at != at && strcmp(warp.at, at))
        fail("is at %s, other lanes of the warp at %s", at, warp.at);
    warp.at = at;
    warp.given[threadIdx.x % 32] = &mine;
    if (++warp.arrived < 32) {
        unsigned generation = warp.generation;
        wait_until(at, [&] { return warp.generation != generation; });
    } else {
        work((X**)warp.given);
        warp.arrived = 0, warp.generation++;
    }
}

// `threads` threads meet; true where all say yes.
inline bool meet(Barrier& barrier, unsigned threads, const char* at, bool yes = true) {
    if (barrier.arrived && strcmp(barrier.at, at)) fail("is at %s, others at %s", at, barrier.at);
    barrier.at = at;
    barrier.all &= yes;
    if (++barrier.arrived < threads) {
        unsigned generation = barrier.generation;
        wait_until(at, [&] { return barrier.generation != generation; }, threads);
    } else {
        barrier.result = barrier.all, barrier.all = true;
        barrier.arrived = 0, barrier.generation++;
    }
    return barrier.result;
}

// To be one of them without waiting for the others.
inline void arrive(Barrier& barrier, unsigned threads, const char* at) {
    if (barrier.arrived && strcmp(barrier.at, at)) fail("is at %s, others at %s", at, barrier.at);
    barrier.at = at;
    if (++barrier.arrived < threads) return;
    barrier.result = barrier.all, barrier.all = true;
    barrier.arrived = 0, barrier.generation++;
}

// An address of shared memory has the block's rank in its cluster above the offset into that memory, as on a GPU.
constexpr unsigned OFFSET = (1 << 24) - 1;
inline unsigned address_in(const Block& block, unsigned offset) { return block.rank << 24 | offset; }

// Where shared memory of a block lies in truth.
inline char* at(const Block& block, unsigned address, unsigned bytes, unsigned alignment) {
    if (address >> 24 != block.rank) fail("%#x is no address of shared memory of block %u", address, block.number);
    address &= OFFSET;
    bool asked = address >= now.shared_start && address + bytes <= now.shared_start + now.shared_bytes;
    bool fixed = address >= FIXED && address + bytes <= MEMORY;
    if (!asked && !fixed)
        fail("%u bytes at %d of shared memory, of which the launch asked for %u", bytes,
             int(address - now.shared_start), now.shared_bytes);
    if (address % alignment) fail("address %u of shared memory is no multiple of %u", address, alignment);
    return block.memory + address;
}

// The same for threads that load or store.
inline char* at(unsigned address, unsigned bytes) {
    auto& landing = me->block->landing;
    unsigned first = (address & OFFSET) / 4;
    for (unsigned n = first; n < first + (address % 4 + bytes + 3) / 4 && n < landing.size(); n++)
        if (landing[n]) fail("is at %u of shared memory, where a copy may land at any time", 4 * n);
    return at(*me->block, address, bytes, bytes);
}

constexpr unsigned ANOTHER_BLOCK = ~0u;
extern unsigned long long stores;  // and fences, counted: a clock

inline void note_store(Block& block, unsigned address, unsigned bytes, unsigned by) {
    if (now.last_first) return;
    address &= OFFSET;
    if (block.stored.empty()) block.stored.resize(MEMORY / 16);
    for (unsigned n = address / 16; n <= (address + bytes - 1) / 16; n++) {
        block.stored[n] = {++stores, by};
        if (by != ANOTHER_BLOCK) me->stored.push_back(n);
    }
}
inline void note_fence() {
    auto& stored = me->block->stored;
    for (unsigned n : me->stored)
        if (stored[n].by == me->thread) stored[n].when = 0;
    me->stored.clear();
    me->fence = ++stores;
}
// Of what the hardware reads or, with `writes`, overwrites.
inline void note_hardware(Block& block, unsigned address, unsigned bytes, bool writes) {
    address &= OFFSET;
    for (unsigned n = address / 16; n <= (address + bytes - 1) / 16 && n < block.stored.size(); n++) {
        if (writes)
            block.stored[n].when = 0;
        else if (block.stored[n].when > me->fence)
            fail("no fence between a store to %u of shared memory and its use in the background", 16 * n);
    }
}

template <class T>
T& shared(unsigned address) {
    return *(T*)at(address, sizeof(T));
}

// A variable of fixed size in shared memory; NUMBER tells it from others.
template <class T, int NUMBER>
T& fixed_shared() {
    static_assert(sizeof(T) <= 48 << 10 && NUMBER < FIXED_COUNT);
    return *(T*)(me->block->memory + FIXED + NUMBER * (48 << 10));
}

// A kernel with its arguments.
template <class P>
Work call(void (*function)(P), const void* params, const void*) {
    return [=] { function(*(const P*)params); };
}
template <class P, class M>
Work call(void (*function)(P, M), const void* params, const void* maps) {
    auto aligned = std::make_shared<M>();
    memcpy(aligned.get(), maps, sizeof(M));
    return [=] { function(*(const P*)params, *aligned); };
}

}  // namespace on_cpu

using std::exp2;
using std::fabs;
using std::fma;
using std::log;

static int min(int x, int y) { return x < y ? x : y; }

template <class T>
static T max(T x, T y) {
    if constexpr (std::is_floating_point_v<T>) return std::fmax(x, y);
    return x > y ? x : y;
}

template <class To, class From>
static To bits(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static float __int_as_float(int x) { return bits<float>(x); }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }

static unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned y = 0;
    for (int n = 0; n < 4; n++) y |= unsigned(bytes >> 8 * (which >> 4 * n & 7) & 0xff) << 8 * n;
    return y;
}

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define ON_CPU_TEXT_(x) #x
#define ON_CPU_TEXT(x) ON_CPU_TEXT_(x)
#define __syncthreads()                                               \
    on_cpu::meet(on_cpu::me->block->barriers[0], on_cpu::now.threads, \
                 "__syncthreads of " __FILE__ ":" ON_CPU_TEXT(__LINE__))
#define __syncwarp() on_cpu::sync_warp("__syncwarp of " __FILE__ ":" ON_CPU_TEXT(__LINE__))

namespace on_cpu {

inline void sync_warp(const char* at) {
    int nothing;
    together(at, nothing, [](int**) {});
}

inline void whole_warp(unsigned mask) {
    if (mask != ~0u) fail("a warp's instruction for lanes %x only", mask);
}

template <class T>
T shuffle(const char* at, unsigned mask, T x, unsigned from) {
    struct {
        T x, y;
        unsigned from;
    } mine{x, x, from % 32};
    whole_warp(mask);
    together(at, mine, [](auto lanes) {
        for (int l = 0; l < 32; l++) lanes[l]->y = lanes[lanes[l]->from]->x;
    });
    return mine.y;
}

inline unsigned vote(const char* at, unsigned mask, bool yes) {
    struct {
        unsigned yes, all;
    } mine{yes, 0};
    whole_warp(mask);
    together(at, mine, [](auto lanes) {
        unsigned all = 0;
        for (int l = 0; l < 32; l++) all |= lanes[l]->yes << l;
        for (int l = 0; l < 32; l++) lanes[l]->all = all;
    });
    return mine.all;
}

}  // namespace on_cpu

template <class T>
static T __shfl_sync(unsigned mask, T x, unsigned lane) {
    return on_cpu::shuffle("__shfl_sync", mask, x, lane);
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T x, unsigned lanes) {
    return on_cpu::shuffle("__shfl_xor_sync", mask, x, threadIdx.x ^ lanes);
}
static unsigned __ballot_sync(unsigned mask, bool yes) { return on_cpu::vote("__ballot_sync", mask, yes); }
static bool __any_sync(unsigned mask, bool yes) { return on_cpu::vote("__any_sync", mask, yes) != 0; }
static bool __all_sync(unsigned mask, bool yes) { return on_cpu::vote("__all_sync", mask, yes) == ~0u; }

template <class T>
static T __ldg(const T* address) {
    return *address;
}
template <class T, class U>
static T atomicAdd(T* address, U x) {
    T before = *address;
    *address += x;
    return before;
}
template <class T, class U>
static T atomicMax(T* address, U x) {
    T before = *address;
    if (before < T(x)) *address = x;
    return before;
}
static double __longlong_as_double(long long x) { return bits<double>(x); }
static long long __double_as_longlong(double x) { return bits<long long>(x); }
template <class T, class U, class V>
static T atomicCAS(T* address, U expected, V x) {
    T before = *address;
    if (before == T(expected)) *address = x;
    return before;
}
static void __threadfence() {}
static void __nanosleep(unsigned) {}
