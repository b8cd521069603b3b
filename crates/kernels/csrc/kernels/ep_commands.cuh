// Commands to this rank's proxy: threads of the host that send ranges of memory to ranks on other nodes.
//
// What this rank writes for a far rank goes to a copy of its inbox there, in pinned memory. Where a flag or a word would be
// set at a near rank, a command is appended to a ring in pinned memory: which range is complete. The far rank's proxy sets
// the flags, tags and words that belong to it once all of its bytes are there.
//
// A command is two words, each with the lap of the ring in its top bits, so that the proxy sees from the words themselves
// whether both are there:
//
//     | lap, 16 | kind, 4 | rank, 12 | epoch, 32 |  | lap, 16 | offset / 8, 29 | bytes / 8, 19 |
//
// In place of offset and length, a command without data has a number of 48 bits.
#pragma once

#include "kernels/ep_common.cuh"

constexpr u32 COMMAND_LENGTH = 19;
constexpr u64 COMMAND_NUMBER = (1ull << 48) - 1;
// Sizes of the stripes that the rings take in turn, as powers of two: of long ranges, and of so few bytes that one thread of
// the proxy would send them all.
constexpr u32 RING_STRIPE = 16;
constexpr u32 RING_STRIPE_OF_FEW = 13;
constexpr u64 FEW_BYTES = 256 << 10;

__device__ __forceinline__ EpRing &ring_at(const EpCommon &c, u32 number) { return at<EpRing>(c.rings, number); }

// The set that a ring has: itself, or the address of its words.
__device__ __forceinline__ void load_ranks(u64 &ranks, u64 from) { ranks = from; }
template <u32 WORDS>
__device__ __forceinline__ void load_ranks(ManyRanks<WORDS> &ranks, u64 from) {
    ranks = ManyRanks<WORDS>::of_words([&](u32 i) -> u64 { return from != 0 ? at<u64>(from, i) : 0; });
}

// The ranks to which the proxy sends.
__device__ __forceinline__ Ranks far_ranks(const EpCommon &c) {
    Ranks far = 0;
    load_ranks(far, ring_at(c, 0).far);
    return far;
}

// Waits until the ring has room for command `number`. The host reads commands without waiting for anything, so this is
// rare; if it does not within the timeout, the command overwrites another one, which the host notices.
__device__ __noinline__ void await_room(const EpCommon &c, EpRing &ring, u64 number) {
    u64 started = clock_ns();
    while (clock_ns() - started < c.limit_ns) {
        u64 read = ld_relaxed_sys_u64(ring.read);
        atomicMax(&ring.read_seen, read);
        if (number < read + EP_COMMANDS) return;
        pause_ns(200);
    }
}

// Appends a command. What it announces must be before a system fence of this thread.
__device__ __noinline__ void append_to(const EpCommon &c, EpRing &ring, u32 kind, u32 rank, u64 epoch, u64 number) {
    u64 place = atomicAdd(&ring.appended, 1ull);
    if (place >= ld_relaxed_gpu_u64(address_of(ring.read_seen)) + EP_COMMANDS) await_room(c, ring, place);
    u64 lap = (place / EP_COMMANDS % EP_LAPS + 1) << 48;
    u64 what = lap | u64(kind) << 44 | u64(rank) << 32 | static_cast<u32>(epoch);
    st_relaxed_sys_v2_u64(ring.commands + place % EP_COMMANDS * 16, what, lap | number);
}

// Of `bytes` bytes at `offset` in the inbox, both multiples of 8.
__device__ __forceinline__ u64 range_number(u64 offset, u32 bytes) { return offset / 8 << COMMAND_LENGTH | bytes / 8; }

// Appends the command of a range. Neighbours go to one ring, so that the proxy can join them. `few`: it is one of few.
__device__ __forceinline__ void append_range(const EpCommon &c, u32 kind, u32 rank, u64 epoch, u64 number, bool few = false) {
    u32 stripe = static_cast<u32>(number >> (COMMAND_LENGTH - 3 + (few ? RING_STRIPE_OF_FEW : RING_STRIPE)));
    append_to(c, ring_at(c, stripe & static_cast<u32>(ring_at(c, 0).last)), kind, rank, epoch, number);
}

// The command of a range, in place of the address of a flag: bit 63 distinguishes it.
//
//     | 1 | kind, 4 | rank, 10 | few | offset / 8, 29 | bytes / 8, 19 |
//
// `all`: bytes of all ranges of that kind for the rank.
__device__ __forceinline__ u64 range_command(u32 kind, u32 rank, u64 offset, u32 bytes, u64 all = FEW_BYTES) {
    return 1ull << 63 | u64(kind) << 59 | u64(rank) << 49 | u64(all < FEW_BYTES) << 48 | range_number(offset, bytes);
}

// Appends the command that stands in place of a flag. Not inline, as all that is for far ranks only: the instruction cache is
// cold at the start of a launch.
__device__ __noinline__ void append_in_place(const EpCommon &c, u64 flag, u64 epoch) {
    append_range(c, flag >> 59 & 15, flag >> 49 & 1023, epoch, flag & COMMAND_NUMBER, flag >> 48 & 1);
}

// Sets the flag at an address, or appends the command in its place. After a system fence of this thread.
__device__ __forceinline__ void set_flag(const EpCommon &c, u64 flag, u64 epoch) {
    if (flag >> 63 == 0) {
        st_relaxed_sys_u64(flag, epoch);
    } else {
        append_in_place(c, flag, epoch);
    }
}

// Appends the command that sets control word `word` of this rank's line at a far rank to a tagged number.
__device__ __noinline__ void tell_word(const EpCommon &c, u32 rank, u32 word, u64 epoch, u32 number) {
    append_to(c, ring_at(c, 0), EP_COMMAND_WORD, rank, epoch, u64(word) << 32 | number);
}

// Appends the command that releases the slots of all operations up to `epoch` at a far rank. To all rings: no command of
// those operations follows it.
__device__ __noinline__ void tell_taken(const EpCommon &c, u32 rank, u32 word, u64 epoch) {
#pragma unroll 1
    for (u32 ring = 0; ring <= ring_at(c, 0).last; ++ring) append_to(c, ring_at(c, ring), EP_COMMAND_TAKEN, rank, epoch, word);
}
