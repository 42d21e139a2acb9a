// Belady's rule for routes: of the resident experts outside the current route, the one whose next use is furthest off
// leaves. Experts of a part are of one size and a route needs all of its own at once, so the rule stays optimal for
// each part by itself. A route that the engine refuses is no use of anything.
#include <algorithm>

#include "moestream/replay.h"
#include "policies/indexed_heap.h"

namespace moestream {
namespace {

constexpr uint64_t kNever = UINT64_MAX;

class Belady {
  public:
    Belady(const std::vector<ExpertCache::Part>& parts, const RecordedRoutes& routes, uint32_t experts)
        : parts_(parts), routes_(routes), part_of_(experts, kNone), next_use_(experts, kNever), resident_(experts),
          held_(parts.size()) {
        for (uint32_t p = 0; p < parts.size(); ++p) {
            for (const uint32_t expert : parts[p].experts) part_of_[expert] = p;
            candidates_.emplace_back(experts, Later{&next_use_});
        }
        look_ahead();
    }
    Belady(const Belady&) = delete;  // the heaps point at next_use_
    Belady& operator=(const Belady&) = delete;

    Replayed run(std::span<const uint64_t> part_bytes, size_t counted_from) {
        Replayed result(routes_.size());
        for (size_t r = 0; r < routes_.size(); ++r) {
            if (refused(r)) {
                result.refused[r] = 1;
                continue;
            }
            uint64_t evictions = 0;
            const uint32_t part = part_of_route(r);
            if (part == kNone) continue;
            const uint32_t misses = take_out(r);
            for (uint32_t m = 0; m < misses; ++m) evictions += make_room(part);
            put_back(r);
            result.misses[r] = misses;
            result.hits[r] = static_cast<uint32_t>(routes_.route(r).size()) - misses;
            result.bytes[r] = misses * part_bytes[part];
            if (r < counted_from) continue;
            result.counters.hits += result.hits[r];
            result.counters.misses += misses;
            result.counters.evictions += evictions;
        }
        return result;
    }

  private:
    struct Later {
        const std::vector<uint64_t>* next_use;
        bool operator()(uint32_t a, uint32_t b) const {
            return (*next_use)[a] != (*next_use)[b] ? (*next_use)[a] > (*next_use)[b] : a < b;
        }
    };

    uint32_t part_of_route(size_t r) const {
        for (const uint32_t expert : routes_.route(r)) {
            if (part_of_[expert] != kNone) return part_of_[expert];
        }
        return kNone;
    }
    bool refused(size_t r) const {
        const uint32_t part = part_of_route(r);
        if (part == kNone) return false;
        const auto route = routes_.route(r);
        const auto width = std::count_if(route.begin(), route.end(), [&](uint32_t e) { return part_of_[e] == part; });
        return static_cast<uint64_t>(width) > parts_[part].capacity;
    }
    // next_[i]: the route that uses the expert at position i of `experts` again.
    void look_ahead() {
        next_.assign(routes_.experts.size(), kNever);
        std::vector<uint64_t> upcoming(part_of_.size(), kNever);
        for (size_t r = routes_.size(); r-- > 0;) {
            if (refused(r)) continue;
            for (uint64_t at = routes_.start[r]; at < routes_.start[r + 1]; ++at) {
                next_[at] = upcoming[routes_.experts[at]];
                upcoming[routes_.experts[at]] = r;
            }
        }
    }
    // The route's residents are no candidates while it runs. Returns how many of its experts are missing.
    uint32_t take_out(size_t r) {
        uint32_t misses = 0;
        for (const uint32_t expert : routes_.route(r)) {
            if (part_of_[expert] == kNone) continue;
            if (resident_[expert]) {
                candidates_[part_of_[expert]].remove(expert);
            } else {
                ++misses;
            }
        }
        return misses;
    }
    bool make_room(uint32_t part) {
        if (held_[part] < parts_[part].capacity) {
            ++held_[part];
            return false;
        }
        const uint32_t victim = candidates_[part].top();
        candidates_[part].remove(victim);
        resident_[victim] = false;
        return true;
    }
    void put_back(size_t r) {
        for (uint64_t at = routes_.start[r]; at < routes_.start[r + 1]; ++at) {
            const uint32_t expert = routes_.experts[at];
            if (part_of_[expert] == kNone) continue;
            resident_[expert] = true;
            next_use_[expert] = next_[at];
            candidates_[part_of_[expert]].push(expert);
        }
    }

    const std::vector<ExpertCache::Part>& parts_;
    const RecordedRoutes& routes_;
    std::vector<uint32_t> part_of_;
    std::vector<uint64_t> next_use_;  // a resident expert's next route
    std::vector<bool> resident_;
    std::vector<uint32_t> held_;      // a part: residents
    std::vector<uint64_t> next_;
    std::vector<IndexedHeap<Later>> candidates_;  // a part: residents outside the current route
};

}  // namespace

Replayed replay_belady(const std::vector<ExpertCache::Part>& parts, const RecordedRoutes& routes, uint32_t experts,
                       std::span<const uint64_t> part_bytes, size_t counted_from) {
    return Belady(parts, routes, experts).run(part_bytes, counted_from);
}

}  // namespace moestream
