// The machine of cuda_on_cpu.h: fibers, shared memory, and who runs next.
#include "cuda_on_cpu.h"
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>

Index threadIdx, blockIdx, gridDim;

namespace on_cpu {

constexpr size_t STACK = 256 << 10;
constexpr int GUARD_BYTE = 0xa5;  // around the shared memory that a launch asked for

Launch now;
Fiber* me;
char* dynamic_shared;
std::vector<Work> late;
unsigned long long stores;

static Work kernel;
static jmp_buf scheduler, failure;
static char message[4096];

void fail(const char* format, ...) {
    int n = me ? snprintf(message, sizeof message, "block %u, thread %u: ", blockIdx.x, threadIdx.x) : 0;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + n, sizeof message - n, format, arguments);
    va_end(arguments);
    _longjmp(failure, 1);
}

static unsigned random_state;
unsigned random_below(unsigned n) {
    random_state = 1664525 * random_state + 1013904223;
    return (random_state >> 16) % n;
}

void leave() {
    if (!_setjmp(me->state)) _longjmp(scheduler, 1);
}

static void thread() {
    kernel();
    for (auto& read : me->reads)
        if (!*read.done) fail("has ended while TMA was to read its block's shared memory");
    me->stores.commit();
    me->stores.finish(0);
    me->done = true;
    me->block->left--;
    _longjmp(scheduler, 1);
}

static char* mapped(size_t bytes) {
    return (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Until the thread waits.
static void run(Fiber& fiber, char* stack) {
    static ucontext_t fresh;
    me = &fiber;
    threadIdx.x = fiber.thread, blockIdx.x = fiber.block->number;
    dynamic_shared = fiber.block->memory + now.shared_start;
    fiber.spins = false;
    if (!_setjmp(scheduler)) {
        if (fiber.started) _longjmp(fiber.state, 1);
        fiber.started = true;
        getcontext(&fresh);
        fresh.uc_stack.ss_sp = stack;
        fresh.uc_stack.ss_size = STACK;
        makecontext(&fresh, thread, 0);
        setcontext(&fresh);
    }
    me = nullptr;
}

// While kernels run, what would end the process ends the launch.
struct Signals {
    static constexpr int CAUGHT[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    struct sigaction before[4];

    Signals() {
        struct sigaction action = {};
        action.sa_handler = [](int signal) {
            fail("%s", signal == SIGILL ? "an address that is not aligned" : strsignal(signal));  // by GXX's flags
        };
        action.sa_flags = SA_NODEFER;
        for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &action, &before[i]);
    }
    ~Signals() {
        for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &before[i], nullptr);
    }
};

static void start(Block& block, unsigned number, Block* cluster) {
    char* memory = block.memory;
    block = Block{number, unsigned(&block - cluster), now.threads, cluster, memory};
    memset(memory, GUARD_BYTE, FIXED);
    memset(memory + now.shared_start, 0xff, now.shared_bytes);
    memset(memory + FIXED, 0xff, MEMORY - FIXED);
    block.fibers.reset(new Fiber[now.threads]());
    for (unsigned t = 0; t < now.threads; t++) block.fibers[t].thread = t, block.fibers[t].block = &block;
}

static void check_guards(const Block& block) {
    for (unsigned i = 0; i < FIXED; i++)
        if ((i < now.shared_start || i >= now.shared_start + now.shared_bytes) && block.memory[i] != char(GUARD_BYTE))
            fail("block %u has written to %d of shared memory, of which the launch asked for %u bytes", block.number,
                 int(i - now.shared_start), now.shared_bytes);
}

[[noreturn]] static void fail_deadlock(const std::vector<Block>& blocks) {
    std::string text = "nobody can go on:";
    for (auto& block : blocks)
        for (unsigned t = 0, first = 0; t < now.threads && block.left; t++) {
            const Fiber &fiber = block.fibers[t], &next = block.fibers[(t + 1) % now.threads];
            bool same = next.at == fiber.at && next.done == fiber.done && !memcmp(next.detail, fiber.detail, 8);
            if (same && t + 1 < now.threads) continue;
            if (!fiber.done)
                text += "\n  block " + std::to_string(block.number) + ", threads " + std::to_string(first) + " to " +
                        std::to_string(t) + ": " + fiber.at + " (" + std::to_string(fiber.detail[0]) + ", " +
                        std::to_string(fiber.detail[1]) + ")";
            first = t + 1;
        }
    fail("%s", text.c_str());
}

// One turn of a warp's threads: until all wait, or have let others run. True where any got further.
static bool run_warp(Block& block, unsigned warp, char* stacks, bool& spinning) {
    bool progress = false, spun[32] = {};
    for (bool any = true; any; progress |= any) {
        any = false;
        for (unsigned l = 0; l < 32; l++) {
            Fiber& fiber = block.fibers[32 * warp + (now.last_first ? 31 - l : l)];
            if (fiber.done || spun[l] || (fiber.ready && !fiber.ready(fiber.condition))) continue;
            run(fiber, stacks + fiber.thread * STACK);
            spun[l] = fiber.spins;
            (fiber.spins ? spinning : any) = true;
        }
    }
    return progress;
}

const char* launch(Work given, const Launch& how) {
    static std::vector<Block> blocks;
    static std::vector<char*> memories, stacks;
    kernel = given, now = how;
    gridDim.x = now.grid;
    late.clear();
    random_state = 1;
    me = nullptr;
    Signals signals;
    if (_setjmp(failure)) return message;
    if (now.grid % now.cluster) fail("a grid of %u blocks in clusters of %u", now.grid, now.cluster);
    unsigned warps = now.threads / 32, next = 0;
    unsigned count = std::max(now.cluster, std::min(now.in_flight, now.grid) / now.cluster * now.cluster);
    blocks.clear();
    blocks.resize(count);
    while (memories.size() < count) memories.push_back(mapped(MEMORY)), stacks.push_back(mapped(1024 * STACK));
    for (unsigned b = 0; b < count; b++) blocks[b].memory = memories[b];
    // In the second order some blocks and warps pause for some rounds, so that none stays ahead or behind.
    std::vector<bool> paused(count * (1 + warps));
    bool pauses = false;
    for (int stale = 0; stale < 100;) {
        for (unsigned i = 0; i < paused.size(); i++)
            if (random_below(16) == 0) paused[i] = random_below(i < count ? 2 : 4) == 0;
        bool alive = false, progress = false, spinning = false;
        for (unsigned c = 0; c < count; c += now.cluster) {  // clusters that are done make room
            unsigned left = 0;
            for (unsigned b = c; b < c + now.cluster; b++) left += blocks[b].left;
            for (unsigned b = c; !left && b < c + now.cluster; b++) {
                if (blocks[b].fibers) check_guards(blocks[b]), blocks[b].fibers.reset();
                if (next < now.grid) start(blocks[b], next++, &blocks[c]);
            }
        }
        for (unsigned b = 0; b < count; b++) {
            alive |= blocks[b].fibers != nullptr;
            if (pauses && paused[b]) continue;
            for (unsigned w = 0; w < warps && blocks[b].left; w++)
                if (!pauses || !paused[count + b * warps + w])
                    progress |= run_warp(blocks[b], now.last_first ? warps - 1 - w : w, stacks[b], spinning);
        }
        if (!alive) return nullptr;
        if (progress) {
            stale = 0;
            pauses = now.last_first;
        } else if (pauses) {
            pauses = false;
        } else if (!late.empty()) {  // in whatever order
            std::swap(late[random_below(late.size())], late.back());
            Work work = std::move(late.back());
            late.pop_back();
            work();
        } else {
            stale += spinning ? 1 : 100;
        }
    }
    fail_deadlock(blocks);
}

}  // namespace on_cpu
