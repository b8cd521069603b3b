// The machine's own state: launches, blocks, warps and lanes of one run.
#pragma once

#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulate/knowledge.h"
#include "emulate/machine.h"

namespace emulate {

constexpr uint32_t WARP_LANES = 32;
constexpr uint32_t BARRIERS = 16;
constexpr size_t STACK_BYTES = 64 << 10;
// Bytes of static shared memory that a block may have.
constexpr size_t STATIC_BYTES = 16 << 10;

// Which word of what `emulate_switch` keeps is the frame's address.
#if defined(__x86_64__)
constexpr size_t FRAME_LINK = 5;
#else
constexpr size_t FRAME_LINK = 10;
#endif

struct Block;
struct Warp;

// What happened to each 8 bytes of some memory. Costs memory where something did.
class Shadow {
  public:
    explicit Shadow(size_t bytes) : words(static_cast<Word *>(calloc(bytes / 8 + 2, sizeof(Word))), free) {}
    Word *at(uint64_t offset) const { return words.get() + offset / 8; }

  private:
    std::unique_ptr<Word, void (*)(void *)> words;
};

// What was released at a place, for who acquires it.
struct Released {
    Knowledge known;
    Scope scope = Scope::System;
    uint32_t device = 0, block = 0;
};

struct Lane {
    uint32_t thread = 0;
    Warp *warp = nullptr;
    uint32_t number = 0;
    // Where it goes on, and its stack.
    void *saved = nullptr;
    uint8_t *stack = nullptr;
    // What it waits for, if it waits.
    const char *waits = nullptr;
    uint64_t waits_at = 0;
    // What it brings to the other lanes or threads, and what it gets.
    Together what = Together::Sync;
    uint32_t mask = 0;
    uint64_t operand = 0;
    uint32_t argument = 0;
    uint64_t result = 0;
    // For each group of bulk stores that it has committed, its time then; and whether a group is open.
    std::vector<uint32_t> groups;
    bool open_group = false;
    // Knowledge of this lane; the part that later relaxed stores release after its last fence; and what its relaxed
    // loads have seen, which a later fence acquires, from this GPU and from others.
    Knowledge known, fenced_here, seen_here, seen_there;
    bool has_fence = false;
    Scope fence_scope = Scope::Block;
    uint32_t *times = nullptr;

    Who who(Agent agent) const;
    bool knows(const Access &access) const {
        return access.who == who(SELF) || known.seen.time_of(access.who) >= access.time;
    }
    // All it knows, itself too; what it does from now on is later.
    Knowledge release();
};

struct Warp {
    Block *block = nullptr;
    std::vector<Lane> lanes;
    // Masks of lanes: runnable; yielded until the next turn; waiting for other lanes of the warp; ended.
    uint32_t ready = 0, yielded = 0, gathering = 0, ended = 0;
    // Chance of sleeping through a round, out of 256.
    uint32_t sleep_chance = 0;
};

struct Barrier {
    uint32_t arrived = 0, expected = 0, sum = 0;
    Vote vote = Vote::None;
    std::vector<Lane *> waiting;
    Knowledge known;
};

struct Launch;

struct Block {
    Launch *launch = nullptr;
    uint32_t number = 0;
    uint32_t alive = 0;
    std::vector<Warp> warps;
    std::vector<uint8_t> shared_storage;
    uint8_t *shared = nullptr;
    size_t shared_dynamic = 0, shared_static = 0;
    std::vector<std::pair<const void *, size_t>> statics;
    // By address: who initialised it and when, and what those who arrived knew.
    struct Mbarrier {
        Access init;
        Knowledge known;
    };
    std::map<uint32_t, Mbarrier> mbarriers;
    Barrier barriers[BARRIERS];
    // Its number among those of all streams.
    uint32_t place = 0;
    std::unique_ptr<Shadow> shadow;

    size_t shared_bytes() const { return shared_dynamic + STATIC_BYTES; }
};

struct Launch {
    const char *kernel = "";
    void (*entry)(const void *) = nullptr;
    std::vector<uint8_t> args;
    uint32_t blocks = 0, threads = 0, shared = 0, stream = 0, device = 0;
    // Rounds until it starts, once those before it in its stream have ended.
    uint32_t delay = 0;
    // Blocks that may run: the others begin as these end.
    uint32_t admitted = 0;
    bool started = false, ended = false;
    uint32_t alive = 0;
    std::deque<Block> running;
};

// A bulk copy under way.
struct Bulk {
    bool is_store;
    Lane *lane;
    Block *block;
    uint64_t group;
    uint32_t shared;
    uint64_t global;
    uint32_t bytes;
    uint32_t barrier;
    uint32_t time;
    // A store that has read its source keeps it here.
    bool has_read;
    std::vector<uint8_t> kept;
};

struct Area {
    uint64_t base, bytes;
    std::string name;
    std::unique_ptr<Shadow> shadow;
};

// A block of a stream, in whichever launch.
struct BlockPlace {
    uint32_t stream, block;
    // By thread and agent.
    std::vector<uint32_t> times;
};

struct Machine {
    std::deque<Launch> launches;
    std::vector<Area> areas;
    std::vector<std::unique_ptr<Bulk>> bulk;
    uint64_t random = 1;
    uint64_t clock = 1000;
    // Counts what others may wait for.
    uint64_t progress = 0;
    // Of 65536 rounds, in how many a bulk copy gets on.
    uint32_t bulk_chance = 0;
    std::vector<Warp *> warps;
    Lane *running = nullptr;
    void *scheduler = nullptr;
    std::string error;
    std::deque<BlockPlace> places;
    std::unordered_map<uint64_t, Released> released;
    // What is before each stream's next launch.
    std::map<uint32_t, Knowledge> streams;

    uint64_t next_random();
    uint32_t below(uint32_t limit) { return uint32_t((next_random() >> 32) * limit >> 32); }
};

extern thread_local Machine *machine __attribute__((tls_model("initial-exec")));

// Fibers.
void switch_to_scheduler();
void run_lane(Machine &m, Lane &lane);

// Barriers, when a thread of the block has ended.
void thread_ended(Block &block);
void lane_ended(Warp &warp);

// What lanes know when they meet.
void meet(Warp &warp, uint32_t mask);
// Notes an access; fails if it races with another. `agent`: who does it, of the running lane's.
void note(uint64_t address, size_t bytes, bool writes, bool atomic, Agent agent, const char *what);

// Bulk copies. Gets one further: a store reads its source, and then writes. True when it is done.
bool advance(Machine &m, Bulk &bulk);
void advance_some(Machine &m);
// All that are under way. True if there were any.
bool advance_all(Machine &m);
// Fails if the thread leaves while its stores read its block's shared memory.
void check_stores_read(Lane &lane);
uint8_t *shared_of(Block &block, uint32_t number, size_t bytes);

std::string describe(const Lane &lane);
// Where a lane is in the code, as addresses for the harness to look up.
std::string where(const Lane &lane);
std::string describe_address(const Machine &m, uint64_t address);
std::string describe_waits(const Machine &m);

}  // namespace emulate
