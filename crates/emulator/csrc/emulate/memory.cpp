// Which memory kernels touch: every plain load and store is reported here by the compiler, as for its thread sanitizer.
#include <algorithm>
#include <cstdio>

#include "emulate/internal.h"

// This library's image, in which constants lie.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;
extern "C" __attribute__((visibility("hidden"))) const char _end;

namespace emulate {

namespace {

// One in this many plain loads and stores is a switch point.
constexpr uint64_t PLAIN_STEPS = 64;

Area *area_of(Machine &m, uint64_t address, size_t bytes) {
    auto after = std::upper_bound(m.areas.begin(), m.areas.end(), address,
                                  [](uint64_t value, const Area &area) { return value < area.base; });
    if (after == m.areas.begin()) return nullptr;
    Area &area = *std::prev(after);
    return address + bytes <= area.base + area.bytes ? &area : nullptr;
}

bool within(uint64_t address, size_t bytes, const void *base, size_t length) {
    uint64_t begin = reinterpret_cast<uint64_t>(base);
    return address >= begin && address + bytes <= begin + length;
}

void plain(void *at, size_t bytes, bool writes) {
    Machine *m = machine;
    if (!m || !m->running) return;
    uint64_t address = reinterpret_cast<uint64_t>(at);
    if (within(address, bytes, m->running->stack, STACK_BYTES)) return;
    if (m->next_random() % PLAIN_STEPS == 0) step(writes ? "a plain store" : "a plain load", address, true);
    note(address, bytes, writes, false, SELF, writes ? "a store" : "a load");
}

[[noreturn]] void fail_race(const Access &now, const Access &before, uint64_t address, size_t bytes, const char *what) {
    Machine &m = *machine;
    const BlockPlace &place = m.places[before.who.block];
    static const char *const BY[] = {"", "'s bulk stores", "'s bulk stores", "'s bulk loads"};
    const char *did = before.atomic ? (before.writes ? "changed" : "looked at") : (before.writes ? "wrote" : "read");
    fail("%s of %zu bytes at %s, which stream %u, block %u, thread %u%s %s%s: unordered accesses", what, bytes,
         describe_address(m, address).c_str(), place.stream, place.block, before.who.index / AGENTS,
         BY[before.who.index % AGENTS], did, now.atomic || before.atomic ? ", one of them as an ordinary access" : "");
}

// Compares an access to one word with the last ones, and takes its place among them.
void note_word(const Lane &lane, Word &word, const Access &now, uint64_t address, size_t bytes, const char *what) {
    Access *place = nullptr;
    for (Access &before : word.last) {
        if (before.time == 0) {
            if (!place || place->time != 0) place = &before;
            continue;
        }
        bool known = before.who == now.who && now.who.index % AGENTS == SELF ? true : lane.knows(before);
        bool conflict = (before.writes || now.writes) && !(before.atomic && now.atomic);
        if (!known && conflict && before.mask & now.mask) fail_race(now, before, address, bytes, what);
        bool covered = (before.mask & ~now.mask) == 0 && (now.writes || !before.writes) && before.atomic == now.atomic;
        if (known && covered) {
            before.time = 0;
            if (!place || place->time != 0) place = &before;
        }
    }
    if (!place) place = &word.last[random_bits() % 4];
    *place = now;
}

}  // namespace

Who Lane::who(Agent agent) const {
    return {warp->block->place, thread * AGENTS + agent};
}

Knowledge Lane::release() {
    known.seen.know(who(SELF), times[SELF]);
    ++times[SELF];
    return known;
}

void meet(Warp &warp, uint32_t mask) {
    Knowledge all;
    const Lane *last = nullptr;
    for (uint32_t l = 0; l < warp.lanes.size(); ++l) {
        Lane &lane = warp.lanes[l];
        if (!(mask >> l & 1)) continue;
        if (!last || !last->known.same(lane.known)) all.join(lane.known);
        last = &lane;
    }
    for (uint32_t l = 0; l < warp.lanes.size(); ++l) {
        if (mask >> l & 1) all.seen.know(warp.lanes[l].who(SELF), warp.lanes[l].times[SELF]++);
    }
    for (uint32_t l = 0; l < warp.lanes.size(); ++l) {
        if (mask >> l & 1) warp.lanes[l].known = all;
    }
}

void note(uint64_t address, size_t bytes, bool writes, bool atomic, Agent agent, const char *what) {
    Machine &m = *machine;
    Lane &lane = *m.running;
    Block &block = *lane.warp->block;
    if (writes) ++m.progress;
    const Shadow *shadow = nullptr;
    uint64_t base = 0;
    if (within(address, bytes, block.shared, block.shared_bytes())) {
        shadow = block.shadow.get();
        base = reinterpret_cast<uint64_t>(block.shared);
    } else if (const Area *area = area_of(m, address, bytes)) {
        shadow = area->shadow.get();
        base = area->base;
    } else {
        uint64_t image = reinterpret_cast<uint64_t>(&__ehdr_start);
        if (!writes && within(address, bytes, &__ehdr_start, reinterpret_cast<uint64_t>(&_end) - image)) return;
        fail("%s of %zu bytes at %s", what, bytes, describe_address(m, address).c_str());
    }
    Access now;
    now.who = lane.who(agent);
    now.time = lane.times[agent];
    now.writes = writes;
    now.atomic = atomic;
    for (uint64_t at = address - base, end = at + bytes; at < end;) {
        uint64_t next = std::min(end, (at / 8 + 1) * 8);
        now.mask = uint8_t(((1u << (next - at)) - 1) << at % 8);
        note_word(lane, *shadow->at(at), now, address, bytes, what);
        at = next;
    }
}

void ordered(uint64_t address, size_t bytes, bool reads, bool writes, Order order, Scope scope) {
    if (address % bytes) {
        fail("an access of %zu bytes at %llx, which is not aligned", bytes, static_cast<unsigned long long>(address));
    }
    Machine &m = *machine;
    Lane &lane = *m.running;
    const Launch &launch = *lane.warp->block->launch;
    note(address, bytes, writes, true, SELF, reads && writes ? "an atomic" : writes ? "a store with an order" : "a load with an order");
    auto found = m.released.find(address);
    if (reads && found != m.released.end()) {
        const Released &from = found->second;
        bool here = from.device == launch.device;
        Scope least = std::min(scope, from.scope);
        bool reaches = from.block == lane.warp->block->place || least >= (here ? Scope::Gpu : Scope::System);
        if (reaches && (order == Order::Acquire || order == Order::Both)) {
            lane.known.join(from.known);
        } else if (reaches) {
            (here ? lane.seen_here : lane.seen_there).join(from.known);
        }
    }
    if (!writes) return;
    Released now{Knowledge(), scope, launch.device, lane.warp->block->place};
    bool releases = order == Order::Release || order == Order::Both;
    if (releases) {
        now.known = lane.release();
    } else if (lane.has_fence) {
        now.known = lane.fenced_here;
        now.scope = std::min(scope, lane.fence_scope);
    }
    bool something = releases || lane.has_fence;
    if (reads && found != m.released.end()) {
        // One atomic after the other: who acquires the last acquires all.
        if (something) {
            now.known.join(found->second.known);
            now.scope = std::min(now.scope, found->second.scope);
            found->second = now;
        }
    } else if (something) {
        m.released[address] = now;
    } else if (found != m.released.end()) {
        m.released.erase(found);
    }
}

void fence(Order, Scope scope) {
    step("a fence", 0, false);
    Lane &lane = *machine->running;
    if (scope >= Scope::Gpu) lane.known.join(lane.seen_here);
    if (scope >= Scope::System) lane.known.join(lane.seen_there);
    lane.fenced_here = lane.release();
    lane.has_fence = true;
    lane.fence_scope = scope;
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

std::string where(const Lane &lane) {
    // Frames are linked: each begins with the address of the one before it, and the address to return to.
    uint64_t image = reinterpret_cast<uint64_t>(&__ehdr_start);
    uint64_t frame = machine->running == &lane ? reinterpret_cast<uint64_t>(__builtin_frame_address(0))
                                               : static_cast<uint64_t *>(lane.saved)[FRAME_LINK];
    std::string text;
    for (int i = 0; i < 24 && within(frame, 16, lane.stack, STACK_BYTES); ++i) {
        const uint64_t *words = reinterpret_cast<const uint64_t *>(frame);
        char address[32];
        // The call, not what comes after it.
        snprintf(address, sizeof address, "%s%llx", text.empty() ? " @{" : ",", static_cast<unsigned long long>(words[1] - image - 1));
        text += address;
        frame = words[0];
    }
    return text.empty() ? text : text + "}";
}

std::string describe_address(const Machine &m, uint64_t address) {
    char text[256];
    for (const Launch &launch : m.launches) {
        for (const Block &block : launch.running) {
            if (!within(address, 1, block.shared, block.shared_bytes())) continue;
            bool own = m.running && m.running->warp->block == &block;
            return "byte " + std::to_string(address - reinterpret_cast<uint64_t>(block.shared)) +
                   (own ? " of shared memory" : " of another block's shared memory");
        }
    }
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
                    what += where(lane);
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
