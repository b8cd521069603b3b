// Which accesses come before which: vector clocks, of all threads of a run and of their bulk copies.
//
// A thread is four agents: itself, its bulk stores as they read shared memory, as they write, and its bulk loads. Each
// agent counts its own time; what a thread knows of the others is a view, the time up to which each is before it. Views
// are shared until they differ: by block, as threads of a block mostly know the same of another.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace emulate {

enum Agent : uint32_t { SELF = 0, STORE_READS = 1, STORE_WRITES = 2, LOADS = 3, AGENTS = 4 };

// One agent: `block` numbers blocks by their stream, and is the same for later launches there.
struct Who {
    uint32_t block = 0;
    uint32_t index = 0;

    bool operator==(const Who &other) const { return block == other.block && index == other.index; }
};

class View {
  public:
    uint32_t time_of(Who who) const;
    void know(Who who, uint32_t time);
    void join(const View &other);
    bool same(const View &other) const { return blocks == other.blocks; }

  private:
    using Times = std::vector<uint32_t>;
    using Blocks = std::vector<std::shared_ptr<Times>>;

    Blocks &own();
    std::shared_ptr<Blocks> blocks;
};

// What a thread knows: what is before it; and what of that is before a fence that made it visible to bulk copies.
struct Knowledge {
    View seen, fenced;

    void join(const Knowledge &other) {
        seen.join(other.seen);
        fenced.join(other.fenced);
    }
    bool same(const Knowledge &other) const { return seen.same(other.seen) && fenced.same(other.fenced); }
};

// An access to up to 8 bytes, remembered.
struct Access {
    Who who;
    uint32_t time = 0;
    uint8_t mask = 0;
    bool writes = false, atomic = false;
};

// The last accesses to 8 bytes; where there are more than fit, some are forgotten.
struct Word {
    Access last[4];
};

}  // namespace emulate
