// Bulk copies, which progress at random points between steps of the threads, and the barriers that count them.
#include <algorithm>

#include "emulate/internal.h"

namespace emulate {

namespace {

// The 8 bytes of a barrier in shared memory.
struct Mbarrier {
    uint32_t parity : 1, arrivals : 15, pending : 16;
    int32_t bytes;
};
static_assert(sizeof(Mbarrier) == 8);

// Of the running lane's block.
Mbarrier &mbarrier_of(uint32_t number) {
    Lane &lane = *machine->running;
    Block &block = *lane.warp->block;
    auto found = block.mbarriers.find(number);
    if (found == block.mbarriers.end()) fail("the mbarrier at %u of shared memory was not initialised", number);
    if (!lane.knows(found->second.init)) fail("the mbarrier at %u of shared memory was initialised, but nothing orders that before this", number);
    return *reinterpret_cast<Mbarrier *>(shared_of(block, number, 8));
}

// Fails if a thread wrote there, and bulk copies that start now may not see it.
void check_fenced(const Lane &lane, uint32_t shared, uint32_t bytes, const char *what) {
    const Block &block = *lane.warp->block;
    for (uint32_t at = shared; at < shared + bytes; at += 8) {
        for (const Access &access : block.shadow->at(at)->last) {
            if (access.time == 0 || !access.writes || access.who.index % AGENTS != SELF) continue;
            if (lane.known.fenced.time_of(access.who) >= access.time) continue;
            fail("%s at %u of shared memory, where thread %u wrote: without fence.proxy.async after that, it may not see it",
                 what, at, access.who.index / AGENTS);
        }
    }
}

void turn_if_complete(Mbarrier &barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.parity ^= 1;
    barrier.pending = barrier.arrivals;
    progress();
}

void check_bulk(uint64_t global, uint32_t shared, uint32_t bytes, const char *what) {
    if (global % 16 || shared % 16 || bytes % 16 || bytes == 0) {
        fail("%s of %u bytes between %llx and %u of shared memory: not multiples of 16", what, bytes,
             static_cast<unsigned long long>(global), shared);
    }
}

void poison(uint8_t *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t noise = random_bits();
        memcpy(at + i, &noise, 8);
    }
}

void drop_done(std::vector<std::unique_ptr<Bulk>> &list) {
    list.erase(std::remove(list.begin(), list.end(), nullptr), list.end());
}

}  // namespace

bool advance(Machine &m, Bulk &bulk) {
    ++m.progress;
    uint8_t *global = reinterpret_cast<uint8_t *>(bulk.global);
    if (!bulk.is_store) {
        if (!bulk.block->mbarriers.count(bulk.barrier)) {
            m.error = "a bulk load is complete, and its mbarrier is not there any more";
            return true;
        }
        memcpy(shared_of(*bulk.block, bulk.shared, bulk.bytes), global, bulk.bytes);
        Mbarrier &barrier = *reinterpret_cast<Mbarrier *>(shared_of(*bulk.block, bulk.barrier, 8));
        Who who = {bulk.block->place, bulk.lane->thread * AGENTS + LOADS};
        bulk.block->mbarriers[bulk.barrier].known.seen.know(who, bulk.time);
        barrier.bytes -= int32_t(bulk.bytes);
        turn_if_complete(barrier);
        return true;
    }
    if (!bulk.has_read) {
        const uint8_t *from = shared_of(*bulk.block, bulk.shared, bulk.bytes);
        bulk.kept.assign(from, from + bulk.bytes);
        bulk.has_read = true;
        return false;
    }
    memcpy(global, bulk.kept.data(), bulk.bytes);
    return true;
}

void advance_some(Machine &m) {
    bool any = false;
    for (auto &bulk : m.bulk) {
        if (m.below(65536) < m.bulk_chance && advance(m, *bulk)) {
            bulk = nullptr;
            any = true;
        }
    }
    if (any) drop_done(m.bulk);
}

bool advance_all(Machine &m) {
    if (m.bulk.empty()) return false;
    for (auto &bulk : m.bulk) {
        while (!advance(m, *bulk)) {
        }
        bulk = nullptr;
    }
    m.bulk.clear();
    return true;
}

void bulk_load(uint32_t dst, uint64_t src, uint32_t bytes, uint32_t barrier) {
    Machine &m = *machine;
    Lane &lane = *m.running;
    Block &block = *lane.warp->block;
    check_bulk(src, dst, bytes, "a bulk load");
    mbarrier_of(barrier);
    const Access &init = block.mbarriers[barrier].init;
    if (lane.known.fenced.time_of(init.who) < init.time) {
        fail("a bulk load by the mbarrier at %u of shared memory, without a fence since it was initialised", barrier);
    }
    check_fenced(lane, dst, bytes, "a bulk load");
    uint32_t time = ++lane.times[LOADS];
    note(src, bytes, false, false, LOADS, "a bulk load");
    note(reinterpret_cast<uint64_t>(shared_of(block, dst, bytes)), bytes, true, false, LOADS, "a bulk load's store");
    poison(shared_of(block, dst, bytes), bytes);
    m.bulk.push_back(std::make_unique<Bulk>(Bulk{false, &lane, &block, 0, dst, src, bytes, barrier, time, false, {}}));
    step("a bulk load", src, false);
}

void bulk_store(uint64_t dst, uint32_t src, uint32_t bytes) {
    Machine &m = *machine;
    Lane &lane = *m.running;
    Block &block = *lane.warp->block;
    check_bulk(dst, src, bytes, "a bulk store");
    check_fenced(lane, src, bytes, "a bulk store");
    uint32_t time = ++lane.times[STORE_WRITES];
    lane.times[STORE_READS] = time;
    note(reinterpret_cast<uint64_t>(shared_of(block, src, bytes)), bytes, false, false, STORE_READS, "a bulk store's load");
    note(dst, bytes, true, false, STORE_WRITES, "a bulk store");
    lane.open_group = true;
    m.bulk.push_back(std::make_unique<Bulk>(Bulk{true, &lane, &block, lane.groups.size(), src, dst, bytes, 0, time, false, {}}));
}

void bulk_commit() {
    Lane &lane = *machine->running;
    lane.groups.push_back(lane.times[STORE_WRITES]);
    lane.open_group = false;
    step("a bulk store", 0, false);
}

void bulk_wait(uint32_t pending, bool only_read) {
    Machine &m = *machine;
    Lane &lane = *m.running;
    // In between, others may see that nothing is there yet.
    step("bulk stores", 0, true);
    uint64_t before = lane.groups.size() > pending ? lane.groups.size() - pending : 0;
    if (before > 0) {
        lane.known.seen.know(lane.who(STORE_READS), lane.groups[before - 1]);
        if (!only_read) lane.known.seen.know(lane.who(STORE_WRITES), lane.groups[before - 1]);
    }
    for (auto &bulk : m.bulk) {
        if (!bulk->is_store || bulk->lane != &lane || bulk->group >= before) continue;
        if (only_read && bulk->has_read) continue;
        bool done = advance(m, *bulk);
        if (!done && !only_read) done = advance(m, *bulk);
        if (done) bulk = nullptr;
    }
    drop_done(m.bulk);
}

void check_stores_read(Lane &lane) {
    if (lane.open_group) fail("ends with bulk stores that no group was made of");
    for (auto &bulk : machine->bulk) {
        if (bulk->lane != &lane) continue;
        if (!bulk->is_store) fail("ends while a bulk load of its own is under way");
        // The block's shared memory may be reused from here on.
        if (!bulk->has_read) fail("ends while its bulk stores still read shared memory");
        bulk->lane = nullptr;
    }
}

void fence_async() {
    step("a fence", 0, false);
    Lane &lane = *machine->running;
    Knowledge all = lane.release();
    lane.known.fenced.join(all.seen);
}

void mbarrier_init(uint32_t number, uint32_t arrivals) {
    Lane &lane = *machine->running;
    Block &block = *lane.warp->block;
    if (number % 8 || arrivals == 0 || arrivals >= 1 << 15) fail("an mbarrier at %u for %u arrivals", number, arrivals);
    Access init;
    init.who = lane.who(SELF);
    init.time = lane.times[SELF];
    block.mbarriers[number] = {init, Knowledge()};
    Mbarrier fresh = {};
    fresh.arrivals = fresh.pending = arrivals;
    memcpy(shared_of(block, number, 8), &fresh, 8);
}

void mbarrier_invalidate(uint32_t number) {
    mbarrier_of(number);
    machine->running->warp->block->mbarriers.erase(number);
}

void mbarrier_arrive(uint32_t number, uint32_t arrivals, uint32_t bytes) {
    step("an mbarrier", number, false);
    Lane &lane = *machine->running;
    Mbarrier &barrier = mbarrier_of(number);
    if (barrier.pending < arrivals) fail("more arrivals at the mbarrier at %u than its %u", number, unsigned(barrier.arrivals));
    lane.warp->block->mbarriers[number].known.join(lane.release());
    barrier.bytes += int32_t(bytes);
    barrier.pending -= arrivals;
    turn_if_complete(barrier);
}

bool mbarrier_test(uint32_t number, uint32_t parity) {
    step("an mbarrier", number, true);
    Lane &lane = *machine->running;
    if (mbarrier_of(number).parity == (parity & 1)) return false;
    lane.known.join(lane.warp->block->mbarriers[number].known);
    return true;
}

}  // namespace emulate
