#include "moestream/replay.h"

#include <string>

#include "moestream/error.h"

namespace moestream {
namespace {

void require(bool condition, size_t route, const char* what) {
    if (!condition) throw Error(ErrorKind::usage, "replay: route " + std::to_string(route) + ' ' + what);
}

void check_starts(std::span<const uint64_t> start, size_t routes, size_t values, const char* what) {
    const std::string name = std::string("replay: ") + what;
    if (start.size() != routes + 1) throw Error(ErrorKind::usage, name + " must have one entry more than the routes");
    if (start.front() != 0 || start.back() != values)
        throw Error(ErrorKind::usage, name + " must lead from 0 to " + std::to_string(values));
    for (size_t r = 0; r < routes; ++r) require(start[r] <= start[r + 1], r, "ends before it begins");
}

CacheCounters since(const CacheCounters& now, const CacheCounters& then) {
    return {now.hits - then.hits,
            now.misses - then.misses,
            now.evictions - then.evictions,
            now.speculative_issued - then.speculative_issued,
            now.speculative_used - then.speculative_used,
            now.speculative_wasted - then.speculative_wasted};
}

}  // namespace

void check_routes(const RecordedRoutes& routes, std::span<const uint32_t> bank_of) {
    const size_t count = routes.size();
    check_starts(routes.start, count, routes.experts.size(), "start");
    if (!routes.wish_start.empty()) check_starts(routes.wish_start, count, routes.wishes.size(), "wish_start");
    if (routes.tokens.size() != count || routes.counts.size() != routes.experts.size())
        throw Error(ErrorKind::usage, "replay: tokens has one entry a route, counts one a routed expert");
    std::vector<uint64_t> seen(bank_of.size());  // the last route that named the expert, plus 1
    for (size_t r = 0; r < count; ++r) {
        require(routes.tokens[r] >= 1, r, "is of a step without tokens");
        for (uint64_t at = routes.start[r]; at < routes.start[r + 1]; ++at) {
            const uint32_t expert = routes.experts[at];
            require(expert < bank_of.size(), r, "names an expert the model does not have");
            require(bank_of[expert] == bank_of[routes.experts[routes.start[r]]], r, "names experts of two banks");
            require(seen[expert] != r + 1, r, "names an expert twice");
            require(routes.counts[at] >= 1, r, "has an expert that no token chose");
            seen[expert] = r + 1;
        }
        for (const uint32_t expert : routes.wished(r))
            require(expert < bank_of.size(), r, "wishes for an expert the model does not have");
    }
}

Replayed replay(ExpertCache& cache, const RecordedRoutes& routes, std::span<const uint64_t> part_bytes,
                size_t counted_from) {
    Replayed result(routes.size());
    std::vector<RoutedExpert> routed;
    std::vector<Load> loads;
    CacheCounters before = cache.counters();
    for (size_t r = 0; r < routes.size(); ++r) {
        if (r == counted_from) before = cache.counters();
        const auto experts = routes.route(r);
        routed.clear();
        loads.clear();
        for (size_t i = 0; i < experts.size(); ++i) routed.push_back({experts[i], routes.counts[routes.start[r] + i]});
        if (!cache.route(routed, routes.token[r], routes.tokens[r], loads)) {
            result.refused[r] = 1;
            continue;
        }
        result.misses[r] = static_cast<uint32_t>(loads.size());
        result.hits[r] = static_cast<uint32_t>(experts.size() - loads.size());
        for (const Load& load : loads) result.bytes[r] += part_bytes[cache.part_of(load.expert)];
        // The engine's order: the bank's unused guesses lose their protection before new ones are made.
        if (!experts.empty()) cache.release_speculative(cache.bank_of(experts.front()));
        for (const uint32_t expert : routes.wished(r)) {
            Load load;
            if (!cache.speculate(expert, load)) continue;
            ++result.early[r];
            result.early_bytes[r] += part_bytes[cache.part_of(expert)];
        }
    }
    if (counted_from >= routes.size() && counted_from > 0) before = cache.counters();
    result.counters = since(cache.counters(), before);
    return result;
}

}  // namespace moestream
