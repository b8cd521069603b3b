#include "emulate/knowledge.h"

#include <algorithm>
#include <utility>

namespace emulate {

uint32_t View::time_of(Who who) const {
    if (!blocks || who.block >= blocks->size()) return 0;
    const std::shared_ptr<Times> &times = (*blocks)[who.block];
    return times && who.index < times->size() ? (*times)[who.index] : 0;
}

View::Blocks &View::own() {
    if (!blocks) {
        blocks = std::make_shared<Blocks>();
    } else if (blocks.use_count() > 1) {
        blocks = std::make_shared<Blocks>(*blocks);
    }
    return *blocks;
}

void View::know(Who who, uint32_t time) {
    if (time_of(who) >= time) return;
    Blocks &all = own();
    if (all.size() <= who.block) all.resize(who.block + 1);
    std::shared_ptr<Times> &times = all[who.block];
    if (!times) {
        times = std::make_shared<Times>();
    } else if (times.use_count() > 1) {
        times = std::make_shared<Times>(*times);
    }
    if (times->size() <= who.index) times->resize(std::max<size_t>(who.index + 1, times->size() * 2));
    (*times)[who.index] = time;
}

void View::join(const View &other) {
    if (blocks == other.blocks || !other.blocks) return;
    if (!blocks) {
        blocks = other.blocks;
        return;
    }
    size_t count = other.blocks->size();
    for (size_t b = 0; b < count; ++b) {
        const std::shared_ptr<Times> &theirs = (*other.blocks)[b];
        if (!theirs) continue;
        // Still held after own(), whose copy has it too.
        const Times *mine = b < blocks->size() ? (*blocks)[b].get() : nullptr;
        if (mine == theirs.get()) continue;
        size_t both = mine ? std::min(mine->size(), theirs->size()) : 0;
        const uint32_t *ours = both ? mine->data() : nullptr, *their = theirs->data();
        uint32_t more = 0, less = 0;
        for (size_t i = 0; i < both; ++i) {
            more |= their[i] > ours[i];
            less |= their[i] < ours[i];
        }
        more |= theirs->size() > both;
        less |= mine && mine->size() > both;
        if (!more) continue;
        Blocks &all = own();
        if (all.size() < count) all.resize(count);
        if (!less) {
            all[b] = theirs;
            continue;
        }
        bool longer = mine->size() > both;
        auto joined = std::make_shared<Times>(longer ? *mine : *theirs);
        const uint32_t *rest = longer ? their : ours;
        uint32_t *into = joined->data();
        for (size_t i = 0; i < both; ++i) into[i] = std::max(into[i], rest[i]);
        all[b] = std::move(joined);
    }
}

}  // namespace emulate
