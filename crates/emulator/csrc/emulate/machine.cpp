// Runs launches of kernels as fibers of one thread, in an order that a seed chooses.
//
// A round goes through all warps in a random order. A warp's turn runs its lanes, also in a random order, each until it
// has to wait, or comes to a switch point; some warps sleep through most rounds for a while, some launches start late. A
// caller may leave room for a part of a launch only.
// The clock is virtual: it ticks once per round, and leaps when all do nothing but look, so that long waits end soon.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <sys/mman.h>

#include "emulate/internal.h"

namespace emulate {

thread_local Machine *machine __attribute__((tls_model("initial-exec"))) = nullptr;

extern "C" void emulate_switch(void **save, void *to);

#if defined(__x86_64__)
asm(R"(
.text
.hidden emulate_switch
.globl emulate_switch
.type emulate_switch, @function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulate_switch, .-emulate_switch
)");
// What `emulate_switch` keeps, the entry as the address to return to, and one word that aligns the entry's stack.
constexpr size_t FRAME_WORDS = 8, FRAME_ENTRY = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.hidden emulate_switch
.globl emulate_switch
.type emulate_switch, %function
emulate_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emulate_switch, .-emulate_switch
)");
constexpr size_t FRAME_WORDS = 20, FRAME_ENTRY = 11;
#else
#error "emulation of kernels has no switch of fibers for this architecture"
#endif

namespace {

constexpr uint64_t CANARY = 0x5afe57ac5afe57ac;
constexpr uint64_t ROUND_NS = 100;
// Rounds without progress before the clock leaps, and between leaps. Each leap is an eighth longer than the last one, and so a
// small part of what has passed: of two limits a quarter apart, the shorter one is over first.
constexpr uint32_t STILL_ROUNDS = 600, LEAP_ROUNDS = 100;
// Rounds without progress after which no warp sleeps any more.
constexpr uint32_t AWAKE_ROUNDS = 300;
// A leap of this length without progress is a deadlock.
constexpr uint64_t LONGEST_LEAP = 3'600'000'000'000;
// Rounds after which sleep chances are drawn anew.
constexpr uint32_t REDRAW_ROUNDS = 300;

void fiber_main() {
    Lane *lane = machine->running;
    Launch &launch = *lane->warp->block->launch;
    launch.entry(launch.args.data());
    check_stores_read(*lane);
    Warp &warp = *lane->warp;
    warp.ended |= 1u << lane->number;
    ++machine->progress;
    lane_ended(warp);
    thread_ended(*warp.block);
    switch_to_scheduler();
    abort();
}

// Memory for stacks: those of launches that have ended serve later ones.
class Stacks {
  public:
    Stacks() = default;
    ~Stacks() {
        for (void *chunk : chunks) munmap(chunk, CHUNK * STACK_BYTES);
    }
    Stacks(const Stacks &) = delete;
    Stacks &operator=(const Stacks &) = delete;

    // Null where there is no memory.
    uint8_t *take() {
        if (free.empty()) grow();
        if (free.empty()) return nullptr;
        uint8_t *stack = free.back();
        free.pop_back();
        return stack;
    }
    void give_back(uint8_t *stack) { free.push_back(stack); }

  private:
    static constexpr size_t CHUNK = 256;

    void grow() {
        void *at = mmap(nullptr, CHUNK * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) return;
        madvise(at, CHUNK * STACK_BYTES, MADV_NOHUGEPAGE);
        chunks.push_back(at);
        for (size_t i = CHUNK; i-- > 0;) free.push_back(static_cast<uint8_t *>(at) + i * STACK_BYTES);
    }

    std::vector<void *> chunks;
    std::vector<uint8_t *> free;
};

void prepare(Lane &lane, uint8_t *stack) {
    lane.stack = stack;
    *reinterpret_cast<uint64_t *>(stack) = CANARY;
    uint64_t *top = reinterpret_cast<uint64_t *>(stack + STACK_BYTES);
    uint64_t *frame = top - FRAME_WORDS;
    frame[FRAME_ENTRY] = reinterpret_cast<uint64_t>(&fiber_main);
    lane.saved = frame;
}

// The number of a block of a stream, made when there is none.
uint32_t place_of(Machine &m, const Launch &launch, uint32_t block) {
    size_t found = 0;
    while (found < m.places.size() && (m.places[found].stream != launch.stream || m.places[found].block != block)) ++found;
    if (found == m.places.size()) m.places.push_back({launch.stream, block, {}});
    std::vector<uint32_t> &times = m.places[found].times;
    if (times.size() < launch.threads * AGENTS) times.resize(launch.threads * AGENTS, 1);
    return uint32_t(found);
}

void start(Machine &m, Launch &launch, Stacks &stacks) {
    launch.started = true;
    launch.alive = launch.blocks * launch.threads;
    for (uint32_t b = 0; b < launch.blocks; ++b) {
        Block &block = launch.running.emplace_back();
        block.launch = &launch;
        block.number = b;
        block.place = place_of(m, launch, b);
        block.alive = launch.threads;
        block.shared_dynamic = (launch.shared + 127) & ~127u;
        block.shared_storage.resize(block.shared_bytes() + 1024);
        uint64_t at = reinterpret_cast<uint64_t>(block.shared_storage.data());
        block.shared = reinterpret_cast<uint8_t *>((at + 1023) & ~1023ull);
        for (size_t i = 0; i + 8 <= block.shared_bytes(); i += 8) {
            uint64_t noise = m.next_random();
            memcpy(block.shared + i, &noise, 8);
        }
        block.shadow = std::make_unique<Shadow>(block.shared_bytes());
        block.warps.resize((launch.threads + WARP_LANES - 1) / WARP_LANES);
        for (uint32_t w = 0; w < block.warps.size(); ++w) {
            Warp &warp = block.warps[w];
            warp.block = &block;
            uint32_t count = std::min(WARP_LANES, launch.threads - w * WARP_LANES);
            warp.lanes.resize(count);
            for (uint32_t l = 0; l < count; ++l) {
                Lane &lane = warp.lanes[l];
                lane.warp = &warp;
                lane.number = l;
                lane.thread = w * WARP_LANES + l;
                lane.known = m.streams[launch.stream];
                lane.times = &m.places[block.place].times[lane.thread * AGENTS];
                warp.ready |= 1u << l;
                uint8_t *stack = stacks.take();
                if (!stack) {
                    m.error = "no memory for stacks";
                    return;
                }
                prepare(lane, stack);
            }
            m.warps.push_back(&warp);
        }
    }
}

// Draws the sleep chances of launches, blocks and warps for the next rounds.
void draw_sleep_chances(Machine &m) {
    static const uint32_t CHOICES[] = {0, 0, 0, 64, 128, 200, 245, 254};
    auto choose = [&] { return CHOICES[m.below(8)]; };
    m.bulk_chance = 1u << m.below(16);
    bool lively = m.below(3) == 0;
    for (Launch &launch : m.launches) {
        uint32_t of_launch = choose();
        for (Block &block : launch.running) {
            uint32_t of_block = std::max(of_launch, choose());
            for (Warp &warp : block.warps) warp.sleep_chance = lively ? 0 : std::max(of_block, choose());
        }
    }
}

// Starts the launches that are next in their stream. True if any has not ended.
bool start_due(Machine &m, Stacks &stacks) {
    bool left = false;
    std::set<uint32_t> busy;
    for (Launch &launch : m.launches) {
        if (launch.ended) continue;
        if (launch.started && launch.alive == 0) {
            launch.ended = true;
            Knowledge &after = m.streams[launch.stream];
            for (Block &block : launch.running) {
                for (Warp &warp : block.warps) {
                    for (Lane &lane : warp.lanes) {
                        stacks.give_back(lane.stack);
                        after.join(lane.known);
                        for (uint32_t agent = 0; agent < AGENTS; ++agent) {
                            after.seen.know(lane.who(Agent(agent)), lane.times[agent]++);
                        }
                    }
                }
            }
            launch.running.clear();
            ++m.progress;
            continue;
        }
        left = true;
        if (!busy.insert(launch.stream).second || launch.started) continue;
        if (launch.delay > 0) {
            --launch.delay;
            ++m.progress;
        } else {
            start(m, launch, stacks);
            draw_sleep_chances(m);
            ++m.progress;
        }
    }
    return left;
}

// Runs the lanes of a warp that can run, until all of them wait or a while is over.
void take_turn(Machine &m, Warp &warp) {
    warp.ready |= warp.yielded;
    warp.yielded = 0;
    uint32_t first = m.below(WARP_LANES);
    bool backwards = m.next_random() >> 63;
    uint32_t patience = 1 + m.below(32);
    while (warp.ready && patience-- > 0) {
        for (uint32_t i = 0; i < WARP_LANES && m.error.empty(); ++i) {
            uint32_t lane = (first + (backwards ? WARP_LANES - i : i)) % WARP_LANES;
            if (warp.ready >> lane & 1) run_lane(m, warp.lanes[lane]);
        }
        if (!m.error.empty()) return;
    }
}

// One round: every warp that does not sleep has a turn.
void round(Machine &m, bool all_awake) {
    for (size_t i = m.warps.size(); i > 1; --i) std::swap(m.warps[i - 1], m.warps[m.below(uint32_t(i))]);
    size_t kept = 0;
    for (size_t i = 0; i < m.warps.size(); ++i) {
        Warp &warp = *m.warps[i];
        bool runs = warp.block->number < warp.block->launch->admitted && (warp.ready | warp.yielded);
        if (runs && (all_awake || (m.next_random() & 255) >= warp.sleep_chance)) take_turn(m, warp);
        if (!m.error.empty()) return;
        bool ended = warp.ended == (warp.lanes.size() == WARP_LANES ? ~0u : (1u << warp.lanes.size()) - 1);
        if (!ended) m.warps[kept++] = &warp;
    }
    m.warps.resize(kept);
}

// Detects lack of progress, and advances the clock.
class Watch {
  public:
    void look(Machine &m) {
        m.clock += ROUND_NS;
        if (m.progress != seen) {
            seen = m.progress;
            still = 0;
            leap = ROUND_NS;
            return;
        }
        if (++still < STILL_ROUNDS) return;
        if (still == STILL_ROUNDS && advance_all(m)) {
            still = 0;
            return;
        }
        if ((still - STILL_ROUNDS) % LEAP_ROUNDS != 0) return;
        leap += leap / 8;
        m.clock += leap;
        if (leap > LONGEST_LEAP) m.error = "no progress: " + describe_waits(m);
    }

    bool is_still() const { return still >= AWAKE_ROUNDS; }

  private:
    uint64_t seen = 0, leap = ROUND_NS;
    uint32_t still = 0;
};

// Processor time of this thread: a machine that is busy with other things must not end a run.
uint64_t processor_ms() {
    timespec spent;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
    return uint64_t(spent.tv_sec) * 1000 + uint64_t(spent.tv_nsec) / 1000000;
}

void run_all(Machine &m, uint64_t limit_ms) {
    Stacks stacks;
    const uint64_t began = processor_ms();
    Watch watch;
    for (uint64_t count = 0; start_due(m, stacks) && m.error.empty(); ++count) {
        if (count % REDRAW_ROUNDS == 0) draw_sleep_chances(m);
        round(m, watch.is_still());
        if (!m.error.empty()) return;
        advance_some(m);
        watch.look(m);
        if (!m.error.empty()) return;
        if (count % 64 != 0) continue;
        if (processor_ms() - began > limit_ms) {
            m.error = "not over after " + std::to_string(limit_ms) + " ms of processor time: " + describe_waits(m);
            return;
        }
    }
    while (advance_all(m) && m.error.empty()) {
    }
}

}  // namespace

uint64_t Machine::next_random() {
    random ^= random >> 12;
    random ^= random << 25;
    random ^= random >> 27;
    return random * 0x2545f4914f6cdd1d;
}

void switch_to_scheduler() {
    emulate_switch(&machine->running->saved, machine->scheduler);
}

void run_lane(Machine &m, Lane &lane) {
    m.running = &lane;
    lane.warp->ready &= ~(1u << lane.number);
    emulate_switch(&m.scheduler, lane.saved);
    m.running = nullptr;
    if (*reinterpret_cast<uint64_t *>(lane.stack) != CANARY && m.error.empty()) {
        m.error = describe(lane) + where(lane) + ": its stack of " + std::to_string(STACK_BYTES) + " bytes is too small";
    }
}

Index thread() {
    return {machine->running->thread, 0, 0};
}

Index block() {
    return {machine->running->warp->block->number, 0, 0};
}

Index threads() {
    return {machine->running->warp->block->launch->threads, 1, 1};
}

Index blocks() {
    return {machine->running->warp->block->launch->blocks, 1, 1};
}

void step(const char *what, uint64_t address, bool always) {
    Machine &m = *machine;
    if (!always && m.next_random() >> 63) return;
    Lane &lane = *m.running;
    lane.waits = what;
    lane.waits_at = address;
    lane.warp->yielded |= 1u << lane.number;
    switch_to_scheduler();
    lane.waits = nullptr;
}

void progress() {
    ++machine->progress;
}

uint64_t random_bits() {
    return machine->next_random();
}

uint64_t clock_ns() {
    step("the clock", 0, true);
    return machine->clock;
}

void pause(uint32_t ns) {
    Machine &m = *machine;
    uint64_t until = m.clock + ns;
    // Others run meanwhile, but a long pause must not take one step for every round of the clock.
    for (uint32_t i = 0; i < 8 && m.clock < until; ++i) step("a pause", 0, true);
}

void fail(const char *format, ...) {
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    Machine &m = *machine;
    if (m.error.empty()) m.error = (m.running ? describe(*m.running) + where(*m.running) + ": " : std::string()) + text;
    if (m.running) switch_to_scheduler();
    abort();
}

}  // namespace emulate

using namespace emulate;

// Mirrored by RawLaunch and RawArea of src/lib.rs.
struct EmulateLaunch {
    const char *kernel;
    void (*entry)(const void *);
    const void *args;
    uint64_t args_bytes;
    uint32_t blocks, threads, shared, stream, device, admitted;
};

struct EmulateArea {
    const char *name;
    uint64_t base, bytes;
};

// Runs the launches to their end. Null, or what went wrong, to be freed by `emulate_free`.
extern "C" __attribute__((visibility("default"))) char *emulate_run(const EmulateLaunch *launches, size_t count,
                                                                    const EmulateArea *areas, size_t area_count,
                                                                    uint64_t seed, uint64_t limit_ms) {
    Machine m;
    m.random = seed * 0x9e3779b97f4a7c15 + 0x853c49e6748fea9b;
    if (m.random == 0) m.random = 1;
    for (int i = 0; i < 8; ++i) m.next_random();
    m.clock += m.next_random() >> 24;
    for (size_t i = 0; i < area_count; ++i) {
        m.areas.push_back({areas[i].base, areas[i].bytes, areas[i].name, std::make_unique<Shadow>(areas[i].bytes)});
    }
    std::sort(m.areas.begin(), m.areas.end(), [](const Area &a, const Area &b) { return a.base < b.base; });
    for (size_t i = 0; i < count; ++i) {
        const EmulateLaunch &from = launches[i];
        Launch &launch = m.launches.emplace_back();
        launch.kernel = from.kernel;
        launch.entry = from.entry;
        const uint8_t *args = static_cast<const uint8_t *>(from.args);
        launch.args.assign(args, args + from.args_bytes);
        launch.blocks = from.blocks;
        launch.threads = from.threads;
        launch.shared = from.shared;
        launch.stream = from.stream;
        launch.device = from.device;
        launch.admitted = from.admitted;
        launch.delay = m.below(2) ? 0 : m.below(400);
    }
    machine = &m;
    run_all(m, limit_ms);
    machine = nullptr;
    return m.error.empty() ? nullptr : strdup(m.error.c_str());
}

extern "C" __attribute__((visibility("default"))) void emulate_free(char *text) {
    free(text);
}
