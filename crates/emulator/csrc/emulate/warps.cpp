// What threads do together: lanes of a warp, and threads of a block at its barriers.
#include "emulate/internal.h"

namespace emulate {

namespace {

uint64_t answer(const Warp &warp, const Lane &lane) {
    if (lane.what == Together::Shuffle) {
        // The value of a lane outside the mask is undefined.
        bool there = lane.argument < warp.lanes.size() && lane.mask >> lane.argument & 1;
        return there ? warp.lanes[lane.argument].operand : random_bits();
    }
    uint64_t all = 0;
    bool first = true;
    for (uint32_t l = 0; l < warp.lanes.size(); ++l) {
        if (!(lane.mask >> l & 1)) continue;
        uint64_t value = warp.lanes[l].operand;
        switch (lane.what) {
            case Together::Sync:
            case Together::Shuffle: break;
            case Together::Ballot: all |= uint64_t(value != 0) << l; break;
            case Together::Match: all |= uint64_t(value == lane.operand) << l; break;
            case Together::Add: all = uint32_t(all + value); break;
            case Together::Min: all = first ? value : std::min(all, value); break;
            case Together::Max: all = std::max(all, value); break;
            case Together::And: all = first ? value : all & value; break;
            case Together::Or: all |= value; break;
            case Together::Xor: all ^= value; break;
        }
        first = false;
    }
    return all;
}

const char *name_of(Together what) {
    static const char *const NAMES[] = {"__syncwarp", "a shuffle",        "a vote",           "__match_any_sync",
                                        "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
                                        "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync"};
    return NAMES[uint32_t(what)];
}

// All lanes of the mask are here and want the same.
void complete_together(Warp &warp, uint32_t mask, Together what) {
    // Of these, only __syncwarp orders memory.
    if (what == Together::Sync) meet(warp, mask);
    bool differs = what == Together::Shuffle || what == Together::Match;
    const Lane *answered = nullptr;
    for (uint32_t l = 0; l < warp.lanes.size(); ++l) {
        if (!(mask >> l & 1)) continue;
        Lane &lane = warp.lanes[l];
        lane.result = answered && !differs ? answered->result : answer(warp, lane);
        answered = &lane;
    }
    warp.gathering &= ~mask;
    warp.ready |= mask;
}

void complete_barrier(Barrier &barrier) {
    for (Lane *lane : barrier.waiting) {
        uint32_t count = uint32_t(barrier.arrived);
        switch (barrier.vote) {
            case Vote::None: lane->result = 0; break;
            case Vote::Or: lane->result = barrier.sum > 0; break;
            case Vote::And: lane->result = barrier.sum == count; break;
            case Vote::Count: lane->result = barrier.sum; break;
        }
        lane->known = barrier.known;
        lane->warp->ready |= 1u << lane->number;
    }
    barrier.waiting.clear();
    barrier.known = Knowledge();
    barrier.arrived = 0;
    barrier.expected = 0;
    barrier.sum = 0;
}

}  // namespace

uint64_t together(Together what, uint32_t mask, uint64_t value, uint32_t argument) {
    Machine &m = *machine;
    Lane &lane = *m.running;
    Warp &warp = *lane.warp;
    uint32_t self = 1u << lane.number;
    if (!(mask & self)) fail("a mask of %08x that leaves out the lane itself", mask);
    if (mask & warp.ended) fail("a mask of %08x with lanes that have ended: %08x", mask, mask & warp.ended);
    if (warp.lanes.size() < WARP_LANES && mask >> warp.lanes.size()) fail("a mask of %08x in a warp of %zu", mask, warp.lanes.size());
    lane.what = what;
    lane.mask = mask;
    lane.operand = value;
    lane.argument = argument;
    warp.gathering |= self;
    for (uint32_t here = warp.gathering & mask; here; here &= here - 1) {
        uint32_t l = uint32_t(__builtin_ctz(here));
        const Lane &other = warp.lanes[l];
        if (other.mask != mask || other.what != what) {
            fail("%s with the lanes %08x, and lane %u is at %s with the lanes %08x%s", name_of(what), mask, l,
                 name_of(other.what), other.mask, where(other).c_str());
        }
    }
    if ((warp.gathering & mask) == mask) {
        complete_together(warp, mask, what);
    }
    lane.waits = "lanes of its warp";
    lane.waits_at = mask;
    switch_to_scheduler();
    lane.waits = nullptr;
    return lane.result;
}

uint32_t barrier(uint32_t id, uint32_t count, bool wait, Vote vote, uint32_t value) {
    Machine &m = *machine;
    Lane &lane = *m.running;
    Block &block = *lane.warp->block;
    if (id >= BARRIERS) fail("barrier %u of %u", id, BARRIERS);
    if (count % WARP_LANES != 0) fail("barrier %u for %u threads, which are not whole warps", id, count);
    Barrier &barrier = block.barriers[id];
    if (barrier.arrived == 0) {
        barrier.expected = count;
        barrier.vote = vote;
    }
    if (barrier.expected != count || barrier.vote != vote) {
        fail("barrier %u for %u threads, others arrived for %u, or with another vote", id, count, barrier.expected);
    }
    ++barrier.arrived;
    barrier.sum += value != 0;
    barrier.known.join(lane.release());
    if (wait) barrier.waiting.push_back(&lane);
    if (barrier.arrived == (count ? count : block.alive)) complete_barrier(barrier);
    if (!wait) {
        step("a barrier", id, false);
        return 0;
    }
    lane.waits = "a barrier of its block";
    lane.waits_at = id;
    switch_to_scheduler();
    lane.waits = nullptr;
    return uint32_t(lane.result);
}

void thread_ended(Block &block) {
    --block.alive;
    --block.launch->alive;
    if (block.alive == 0) ++block.launch->admitted;
    for (Barrier &barrier : block.barriers) {
        if (barrier.arrived > 0 && barrier.expected == 0 && barrier.arrived == block.alive) complete_barrier(barrier);
    }
}

void lane_ended(Warp &warp) {
    for (uint32_t l = 0; l < warp.lanes.size(); ++l) {
        if (warp.gathering >> l & 1 && warp.lanes[l].mask & warp.ended) {
            fail("this lane ends, and lane %u waits for it at %s with the lanes %08x%s", l,
                 name_of(warp.lanes[l].what), warp.lanes[l].mask, where(warp.lanes[l]).c_str());
        }
    }
}

}  // namespace emulate
