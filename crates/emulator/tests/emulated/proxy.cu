// A rank's proxy as threads of its host: each warp is a rail that takes the next command of its ring, in no order with others.
#include "kernels/ep_commands.cuh"

struct ProxyArgs {
    // The rings.
    u64 rings;
    // u64[R][2]: this rank's inbox at each far rank, as copied here and as it is there; 0 for a near one.
    u64 inboxes;
    // u64[R]: each far rank's inbox here.
    u64 from;
    // u64[R][R][2]: the epoch up to which each rank has released each other rank's slots, plus 1; by receiver.
    u64 told;
    // u64[warps]: the command that each rail has taken.
    u64 progress;
    // u64[RINGS]: commands that were taken.
    u64 claims;
    // u64[RINGS][R][2]: the epoch up to which this rank has released each rank's slots, and its command: epoch << 32 | command.
    u64 own;
    // Launches of kernels that have ended; how many there are.
    u64 ended;
    u64 expected;
    // void(context, command, command, out[5]): kind (0: flags, 1: tags, 2: taken), offset, count, value, bytes from one to the next.
    u64 decode;
    u64 context;
    u32 rank;
    // Nanoseconds for which a rail pauses at most at each command, and at about every second one of weights in any case.
    u32 delay;
    u32 slow;
    // Commands of each ring after which the proxy ends; 0: none.
    u32 cut;
};

struct EndArgs {
    u64 ended;
};

namespace {

constexpr u32 TAKEN_WORDS = 2, RINGS = 2;

__device__ u64 done_by_all(const ProxyArgs &args, u32 ring, u32 rails) {
    u64 least = ~0ull;
    for (u32 rail = ring; rail < rails; rail += RINGS) {
        u64 done = ld_acquire_sys_u64(args.progress + 8 * rail);
        if (done < least) least = done;
    }
    return least;
}

// Publishes to kernels which slots are free, once no write to them is in flight.
__device__ void publish_taken(const ProxyArgs &args, u32 rails) {
    for (u32 i = 0; i < EP_R * TAKEN_WORDS; ++i) {
        u32 rank = i / TAKEN_WORDS, word = i % TAKEN_WORDS;
        u64 told = ld_acquire_sys_u64(args.told + 8 * ((args.rank * EP_R + rank) * TAKEN_WORDS + word));
        if (told-- == 0) continue;
        u64 epoch = told;
        for (u32 ring = 0; ring < RINGS; ++ring) {
            u64 own = ld_acquire_sys_u64(args.own + 8 * (ring * EP_R * TAKEN_WORDS + i));
            bool done = own != 0 && done_by_all(args, ring, rails) > (own & 0xffffffff);
            epoch = !done ? 0 : own >> 32 < epoch ? own >> 32 : epoch;
        }
        u64 place = at<u64>(args.from, rank) + 8 * (EP_WORD_DISPATCH_TAKEN + word);
        if (ld_relaxed_sys_u64(place) < epoch) st_release_sys_u64(place, epoch);
    }
}

__device__ void carry(const ProxyArgs &args, u64 what, u64 number, u32 ring, u64 place, u32 lane) {
    u32 kind = what >> 44 & 15, rank = what >> 32 & 0xfff;
    u64 from = at<u64>(args.inboxes, 2 * rank), to = at<u64>(args.inboxes, 2 * rank + 1);
    // A lost rank.
    if (to == 0) return;
    bool rows = kind <= EP_COMMAND_BACK || kind == EP_COMMAND_BACK_LESS, words = kind == EP_COMMAND_TABLE || kind == EP_COMMAND_WEIGHTS;
    u64 offset = (number >> COMMAND_LENGTH & ((1ull << 29) - 1)) * 8, bytes = (number & ((1u << COMMAND_LENGTH) - 1)) * 8;
    for (u64 i = lane * 8; (rows || words) && i < bytes; i += LANES * 8) {
        u64 value = at<u64>(from + offset + i);
        if (rows) {
            at<u64>(to + offset + i) = value;
        } else {
            st_relaxed_sys_u64(to + offset + i, value);
        }
    }
    __syncwarp();
    if (lane == 0) {
        u64 out[5];
        reinterpret_cast<void (*)(u64, u64, u64, u64 *)>(args.decode)(args.context, what, number, out);
        for (u64 i = 0; out[0] < 2 && i < out[2]; ++i) {
            u64 word = to + out[1] + out[4] * i, value = out[3];
            if (out[0] == 1) value = value << 32 | static_cast<u32>(ld_relaxed_sys_u64(word));
            st_release_sys_u64(word, value);
        }
        if (out[0] == 2) {
            u32 word = out[1] / 8 - EP_WORD_DISPATCH_TAKEN;
            st_release_sys_u64(args.own + 8 * ((ring * EP_R + rank) * TAKEN_WORDS + word), out[3] << 32 | place);
            if (ring == 0) st_release_sys_u64(args.told + 8 * ((rank * EP_R + args.rank) * TAKEN_WORDS + word), out[3] + 1);
        }
    }
    __syncwarp();
}

}  // namespace

extern "C" __global__ void crossrail_test_proxy(const __grid_constant__ ProxyArgs args) {
    u32 rails = blockDim.x / LANES, rail = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u32 ring = rail % RINGS;
    const EpRing &own = at<EpRing>(args.rings, ring);
    u64 place = 0, commands = own.commands, read = own.read;
    bool taken = false;
    while (true) {
        u64 what = 0, number = 0;
        u32 state = 0;
        if (lane == 0) {
            if (!taken) {
                place = atomicAdd(&at<u64>(args.claims + 8 * ring), 1ull);
                // Only now: an earlier store would report earlier commands as done.
                st_release_sys_u64(args.progress + 8 * rail, place);
            }
            taken = true;
            u64 done = done_by_all(args, ring, rails);
            if (ld_relaxed_sys_u64(read) < done) atomicMax(&at<u64>(read), done);
            if (rail == 0) publish_taken(args, rails);
            bool over = ld_acquire_sys_u64(args.ended) == args.expected;
            u64 entry = commands + place % EP_COMMANDS * 16, lap = place / EP_COMMANDS % EP_LAPS + 1;
            what = ld_acquire_sys_u64(entry);
            number = ld_acquire_sys_u64(entry + 8);
            bool there = what >> 48 == lap && number >> 48 == lap;
            state = there ? 1 : over ? 2 : 0;
        }
        state = __shfl_sync(WHOLE_WARP, state, 0);
        if (state == 2) return;
        if (state == 0) {
            pause_ns(100);
            continue;
        }
        taken = false;
        place = __shfl_sync(WHOLE_WARP, place, 0);
        if (args.cut != 0 && place >= args.cut) return;
        what = __shfl_sync(WHOLE_WARP, what, 0);
        number = __shfl_sync(WHOLE_WARP, number, 0) & COMMAND_NUMBER;
        __syncwarp();
        if (lane == 0) {
            u64 bits = emulate::random_bits() >> 8, until = clock_ns() + bits % args.delay;
            if ((what >> 44 & 15) == EP_COMMAND_WEIGHTS && (bits >> 40 & 1)) until += args.slow;
            while (clock_ns() < until) pause_ns(1000);
        }
        __syncwarp();
        carry(args, what, number, ring, place, lane);
    }
}

extern "C" __global__ void crossrail_test_end(const __grid_constant__ EndArgs args) {
    if (threadIdx.x == 0) atom_add_acq_rel_gpu_u64(args.ended, 1);
}
