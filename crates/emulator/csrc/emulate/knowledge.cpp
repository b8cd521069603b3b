#include "emulate/knowledge.h"

#include <algorithm>

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
        const std::shared_ptr<Times> mine = b < blocks->size() ? (*blocks)[b] : nullptr;
        if (mine == theirs) continue;
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
        auto joined = std::make_shared<Times>(std::max(mine->size(), theirs->size()));
        for (size_t i = 0; i < joined->size(); ++i) {
            uint32_t a = i < mine->size() ? (*mine)[i] : 0, t = i < theirs->size() ? (*theirs)[i] : 0;
            (*joined)[i] = std::max(a, t);
        }
        all[b] = joined;
    }
}

}  // namespace emulate
