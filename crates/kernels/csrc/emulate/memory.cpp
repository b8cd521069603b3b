// Which memory kernels touch: every plain load and store is reported here by the compiler, as for its thread sanitizer.
#include <algorithm>
#include <cstdio>

#include "emulate/internal.h"

// This library's image, in which constants lie.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;
extern "C" __attribute__((visibility("hidden"))) const char _end;

namespace emulate {

namespace {

// Of so many plain loads and stores, one is a switch point.
constexpr uint64_t PLAIN_STEPS = 64;

const Area *area_of(Machine &m, uint64_t address, size_t bytes) {
    auto holds = [&](const Area &area) { return address >= area.base && address + bytes <= area.base + area.bytes; };
    if (m.last_area < m.areas.size() && holds(m.areas[m.last_area])) return &m.areas[m.last_area];
    for (size_t i = 0; i < m.areas.size(); ++i) {
        if (!holds(m.areas[i])) continue;
        m.last_area = i;
        return &m.areas[i];
    }
    return nullptr;
}

bool within(uint64_t address, size_t bytes, const void *base, size_t length) {
    uint64_t begin = reinterpret_cast<uint64_t>(base);
    return address >= begin && address + bytes <= begin + length;
}

void touch(uint64_t address, size_t bytes, bool writes, const char *what) {
    Machine &m = *machine;
    Lane &lane = *m.running;
    Block &block = *lane.warp->block;
    if (writes) ++m.progress;
    if (within(address, bytes, block.shared, block.shared_bytes())) return;
    if (area_of(m, address, bytes)) return;
    uint64_t image = reinterpret_cast<uint64_t>(&__ehdr_start);
    if (!writes && within(address, bytes, &__ehdr_start, reinterpret_cast<uint64_t>(&_end) - image)) return;
    fail("%s of %zu bytes at %s", what, bytes, describe_address(m, address).c_str());
}

void plain(void *at, size_t bytes, bool writes) {
    Machine *m = machine;
    if (!m || !m->running) return;
    uint64_t address = reinterpret_cast<uint64_t>(at);
    if (within(address, bytes, m->running->stack, STACK_BYTES)) return;
    if (m->next_random() % PLAIN_STEPS == 0) step(writes ? "a plain store" : "a plain load", address, true);
    touch(address, bytes, writes, writes ? "a store" : "a load");
}

}  // namespace

void check(const void *address, size_t bytes, bool writes, const char *what) {
    touch(reinterpret_cast<uint64_t>(address), bytes, writes, what);
}

void ordered(uint64_t address, size_t bytes, bool reads, bool writes, Order, Scope) {
    if (address % bytes) fail("an access of %zu bytes at %llx, which is not aligned", bytes, static_cast<unsigned long long>(address));
    touch(address, bytes, writes, reads && writes ? "an atomic" : writes ? "a store" : "a load");
}

void fence(Order, Scope) {
    step("a fence", 0, false);
}

uint8_t *shared_of(Block &block, uint32_t number, size_t bytes) {
    if (number + bytes > block.shared_bytes()) fail("%zu bytes at %u of %zu bytes of shared memory", bytes, number, block.shared_bytes());
    return block.shared + number;
}

void *shared_memory() {
    return machine->running->warp->block->shared;
}

void *shared_static(const void *key, size_t bytes) {
    Block &block = *machine->running->warp->block;
    for (auto &[known, at] : block.statics) {
        if (known == key) return block.shared + at;
    }
    size_t at = block.shared_dynamic + block.shared_static;
    block.shared_static += (bytes + 15) & ~size_t(15);
    if (block.shared_static > STATIC_BYTES) fail("more than %zu bytes of static shared memory", STATIC_BYTES);
    block.statics.emplace_back(key, at);
    return block.shared + at;
}

uint32_t shared_number(const void *address) {
    Block &block = *machine->running->warp->block;
    if (!within(reinterpret_cast<uint64_t>(address), 0, block.shared, block.shared_bytes())) fail("not an address of this block's shared memory");
    return uint32_t(static_cast<const uint8_t *>(address) - block.shared);
}

void *shared_at(uint32_t number, size_t bytes) {
    return shared_of(*machine->running->warp->block, number, bytes);
}

std::string describe(const Lane &lane) {
    const Block &block = *lane.warp->block;
    return std::string(block.launch->kernel) + ", stream " + std::to_string(block.launch->stream) + ", block " +
           std::to_string(block.number) + ", thread " + std::to_string(lane.thread);
}

std::string describe_address(const Machine &m, uint64_t address) {
    char text[256];
    const Area *nearest = nullptr;
    for (const Area &area : m.areas) {
        if (area.base <= address && (!nearest || area.base > nearest->base)) nearest = &area;
    }
    if (!nearest || address - nearest->base > nearest->bytes + (64 << 10)) {
        snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(address));
    } else {
        uint64_t offset = address - nearest->base;
        snprintf(text, sizeof text, "%s + %llu (of %llu)", nearest->name.c_str(), static_cast<unsigned long long>(offset),
                 static_cast<unsigned long long>(nearest->bytes));
    }
    return text;
}

std::string describe_waits(const Machine &m) {
    std::string text;
    size_t told = 0;
    for (const Launch &launch : m.launches) {
        for (const Block &block : launch.running) {
            // Threads of a block that wait for the same are one line.
            std::vector<std::pair<std::string, std::pair<uint32_t, uint32_t>>> kinds;
            for (const Warp &warp : block.warps) {
                for (const Lane &lane : warp.lanes) {
                    if (warp.ended >> lane.number & 1) continue;
                    std::string what = lane.waits ? lane.waits : "nothing";
                    if (lane.waits_at) what += " at " + describe_address(m, lane.waits_at);
                    auto same = std::find_if(kinds.begin(), kinds.end(), [&](auto &kind) { return kind.first == what; });
                    if (same == kinds.end()) {
                        kinds.push_back({what, {1, lane.thread}});
                    } else {
                        ++same->second.first;
                    }
                }
            }
            for (auto &[what, who] : kinds) {
                if (++told > 40) continue;
                text += "\n  " + std::string(launch.kernel) + ", stream " + std::to_string(launch.stream) + ", block " +
                        std::to_string(block.number) + ": " + std::to_string(who.first) + " threads from " +
                        std::to_string(who.second) + " on: " + what;
            }
        }
    }
    return text;
}

}  // namespace emulate

// What the compiler calls.
#define EMULATE_HOOKS(bytes)                                                                     \
    void __tsan_read##bytes(void *at) { emulate::plain(at, bytes, false); }                      \
    void __tsan_write##bytes(void *at) { emulate::plain(at, bytes, true); }                      \
    void __tsan_unaligned_read##bytes(void *at) { emulate::plain(at, bytes, false); }            \
    void __tsan_unaligned_write##bytes(void *at) { emulate::plain(at, bytes, true); }            \
    void __tsan_volatile_read##bytes(void *at) { emulate::plain(at, bytes, false); }             \
    void __tsan_volatile_write##bytes(void *at) { emulate::plain(at, bytes, true); }             \
    void __tsan_unaligned_volatile_read##bytes(void *at) { emulate::plain(at, bytes, false); }   \
    void __tsan_unaligned_volatile_write##bytes(void *at) { emulate::plain(at, bytes, true); }

extern "C" {
EMULATE_HOOKS(1)
EMULATE_HOOKS(2)
EMULATE_HOOKS(4)
EMULATE_HOOKS(8)
EMULATE_HOOKS(16)
void __tsan_read_range(void *at, size_t bytes) {
    emulate::plain(at, bytes, false);
}
void __tsan_write_range(void *at, size_t bytes) {
    emulate::plain(at, bytes, true);
}
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
}
