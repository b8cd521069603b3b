// Interface of emulated kernels to the machine that runs them (machine.cpp). One operating-system thread runs all CUDA
// threads of a run as fibers, so nothing here is atomic or locked. At a switch point, another fiber may be scheduled.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emulate {

struct Index {
    uint32_t x = 0, y = 0, z = 0;
};

// Where the running thread is: itself in its block, its block, and how many there are of both.
Index thread() __attribute__((pure));
Index block() __attribute__((pure));
Index threads() __attribute__((pure));
Index blocks() __attribute__((pure));

// Collective operations of a warp.
enum class Together : uint32_t { Sync, Shuffle, Ballot, Match, Add, Min, Max, And, Or, Xor };

// Result of a block's barrier.
enum class Vote : uint32_t { None, Or, And, Count };

// Ends the run with an error that says where.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Switch point at an access to `address` (0: none), described by `what`. `always`: switch in any case.
void step(const char *what, uint64_t address, bool always);
// Records progress, for the detection of deadlocks.
void progress();
uint64_t random_bits();

// Waits until all lanes of `mask` have arrived, and returns the result; for shuffles, `argument` is the source lane.
uint64_t together(Together what, uint32_t mask, uint64_t value, uint32_t argument);
// Arrives at a barrier of the block: `count` threads make it complete, 0 for all that have not ended.
uint32_t barrier(uint32_t id, uint32_t count, bool wait, Vote vote, uint32_t value);

// The block's dynamic shared memory; the part of its static shared memory that `key` names; addresses in it as numbers.
void *shared_memory();
void *shared_static(const void *key, size_t bytes);
uint32_t shared_number(const void *address);
void *shared_at(uint32_t number, size_t bytes);

// How an access of its own kind orders others.
enum class Order : uint32_t { Relaxed, Acquire, Release, Both };
enum class Scope : uint32_t { Block, Gpu, System };
// Called just before the access itself.
void ordered(uint64_t address, size_t bytes, bool reads, bool writes, Order order, Scope scope);
void fence(Order order, Scope scope);

// Bulk copies: issued here, done some time later, at the latest when they are waited for.
void bulk_load(uint32_t dst, uint64_t src, uint32_t bytes, uint32_t barrier);
void bulk_store(uint64_t dst, uint32_t src, uint32_t bytes);
void bulk_commit();
void bulk_wait(uint32_t pending, bool only_read);
// Makes this thread's writes to shared memory visible to bulk copies.
void fence_async();

void mbarrier_init(uint32_t barrier, uint32_t arrivals);
void mbarrier_invalidate(uint32_t barrier);
void mbarrier_arrive(uint32_t barrier, uint32_t arrivals, uint32_t bytes);
bool mbarrier_test(uint32_t barrier, uint32_t parity);

uint64_t clock_ns();
void pause(uint32_t ns);

template <class T>
uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// Without the compiler's notes of loads and stores: for what the machine checks by itself.
#define EMULATE_PLAIN __attribute__((no_sanitize("thread"), noinline)) inline

// One access to memory, of its own kind.
template <class T>
EMULATE_PLAIN T load(uint64_t address, Order order, Scope scope) {
    step("a load", address, true);
    ordered(address, sizeof(T), true, false, order, scope);
    return *reinterpret_cast<const volatile T *>(address);
}

template <class T>
EMULATE_PLAIN void store(uint64_t address, T value, Order order, Scope scope) {
    step("a store", address, false);
    ordered(address, sizeof(T), false, true, order, scope);
    *reinterpret_cast<volatile T *>(address) = value;
    step("a store", address, false);
}

template <class T, class Change>
EMULATE_PLAIN T exchange(uint64_t address, Order order, Scope scope, Change change) {
    step("an atomic", address, false);
    ordered(address, sizeof(T), true, true, order, scope);
    volatile T *place = reinterpret_cast<volatile T *>(address);
    T before = *place;
    *place = change(before);
    step("an atomic", address, false);
    return before;
}

}  // namespace emulate

// How the harness calls a kernel, and what it is.
template <class Args>
EMULATE_PLAIN void emulate_call(void (*kernel)(Args), const void *args) {
    kernel(*static_cast<const Args *>(args));
}

template <class Args>
constexpr size_t emulate_bytes(void (*)(Args)) {
    return sizeof(Args);
}

#define EMULATE_SHOWN extern "C" __attribute__((visibility("default")))
#define EMULATE_ENTRY(kernel, symbol)                                                                   \
    EMULATE_SHOWN void emulate_entry_##symbol(const void *args) { emulate_call(&kernel, args); }        \
    EMULATE_SHOWN size_t emulate_bytes_##symbol() { return emulate_bytes(&kernel); }
