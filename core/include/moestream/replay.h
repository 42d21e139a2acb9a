// Replay: recorded routes through the engine's own cache, without a byte moving.
//
// A recording says, route by route, what was chosen and which experts the engine then asked for early. Fed to a cache
// of the recorded policy and capacities it gives the recorded hits and misses exactly; fed to another, what that one
// would have done. `belady` is what no policy can beat: it knows the routes to come.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "moestream/cache.h"

namespace moestream {

// Borrowed arrays. Route r is experts[start[r]] .. experts[start[r + 1]] with their counts, and its wishes likewise;
// start and wish_start have one entry more than there are routes. `wish_start` may be empty: nothing was asked for.
struct RecordedRoutes {
    std::span<const uint32_t> bank;     // a route
    std::span<const uint64_t> start;
    std::span<const uint32_t> experts;  // global numbers; distinct and of the route's bank
    std::span<const uint32_t> counts;   // tokens of the step that chose it
    std::span<const uint64_t> token;    // a route: tokens before its step
    std::span<const uint32_t> tokens;   // a route: tokens of its step
    std::span<const uint64_t> wish_start;
    std::span<const uint32_t> wishes;

    size_t size() const { return token.size(); }
    std::span<const uint32_t> route(size_t r) const { return experts.subspan(start[r], start[r + 1] - start[r]); }
    std::span<const uint32_t> wished(size_t r) const {
        if (wish_start.empty()) return {};
        return wishes.subspan(wish_start[r], wish_start[r + 1] - wish_start[r]);
    }
};

// One entry a route. A refused route was wider than its part's capacity: nothing happened, all its numbers are 0. So are
// those of a route in a bank that is in no part: as in the arena, what is always there is no hit.
struct Replayed {
    std::vector<uint32_t> hits, misses;
    std::vector<uint32_t> early;         // experts loaded early after the route
    std::vector<uint64_t> bytes;         // of the misses
    std::vector<uint64_t> early_bytes;   // of the early loads, as if every one of them had been read to its end
    std::vector<uint8_t> refused;
    CacheCounters counters;              // from route `counted_from` on

    explicit Replayed(size_t routes)
        : hits(routes), misses(routes), early(routes), bytes(routes), early_bytes(routes), refused(routes) {}
};

// Throws Error(usage) on a recording that is not as described above or names an expert the table does not have.
void check_routes(const RecordedRoutes& routes, std::span<const uint32_t> bank_of);

// `part_bytes`: bytes of one expert of each part. The routes must have been checked against the cache's table; the
// counters leave out what happened before route `counted_from`.
Replayed replay(ExpertCache& cache, const RecordedRoutes& routes, std::span<const uint64_t> part_bytes,
                size_t counted_from);

// The fewest loads any policy can do with these parts, each for itself, when every route's experts must be there
// together: whoever is used again last leaves. It wants nothing early, which could only add loads.
Replayed replay_belady(const std::vector<ExpertCache::Part>& parts, const RecordedRoutes& routes, uint32_t experts,
                       std::span<const uint64_t> part_bytes, size_t counted_from);

}  // namespace moestream
