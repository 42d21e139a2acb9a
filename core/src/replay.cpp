#include "moestream/replay.h"

#include <algorithm>
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
    if (routes.bank.size() != count || routes.tokens.size() != count || routes.counts.size() != routes.experts.size())
        throw Error(ErrorKind::usage, "replay: bank and tokens have one entry a route, counts one a routed expert");
    const uint32_t banks = bank_of.empty() ? 0 : *std::max_element(bank_of.begin(), bank_of.end()) + 1;
    std::vector<uint64_t> seen(bank_of.size());  // the last route that named the expert, plus 1
    for (size_t r = 0; r < count; ++r) {
        require(routes.bank[r] < banks, r, "is of a bank the model does not have");
        require(routes.tokens[r] >= 1, r, "is of a step without tokens");
        for (uint64_t at = routes.start[r]; at < routes.start[r + 1]; ++at) {
            const uint32_t expert = routes.experts[at];
            require(expert < bank_of.size(), r, "names an expert the model does not have");
            require(bank_of[expert] == routes.bank[r], r, "names an expert of another bank");
            require(seen[expert] != r + 1, r, "names an expert twice");
            require(routes.counts[at] >= 1, r, "has an expert that no token chose");
            seen[expert] = r + 1;
        }
        for (const uint32_t expert : routes.wished(r))
            require(expert < bank_of.size(), r, "wishes for an expert the model does not have");
    }
}

namespace {

// Carries one route out as the arena does; false: refused.
bool replay_route(ExpertCache& cache, const RecordedRoutes& routes, size_t r, std::vector<RoutedExpert>& routed,
                  std::vector<Load>& loads) {
    const auto experts = routes.route(r);
    routed.clear();
    loads.clear();
    for (size_t i = 0; i < experts.size(); ++i) routed.push_back({experts[i], routes.counts[routes.start[r] + i]});
    if (!cache.route(routed, routes.token[r], routes.tokens[r], loads)) return false;
    // The bank's unused guesses lose their protection before new ones are made.
    cache.release_speculative(routes.bank[r]);
    return true;
}

// The last route's matmuls are over: what the policy does not keep leaves.
void drop_unkept(ExpertCache& cache, std::vector<RoutedExpert>& routed) {
    for (const RoutedExpert& one : routed) {
        if (cache.keep(one.expert)) continue;
        cache.unpin_route();
        cache.drop(one.expert);
    }
    routed.clear();
}

}  // namespace

Replayed replay(ExpertCache& cache, const RecordedRoutes& routes, std::span<const uint64_t> part_bytes,
                size_t counted_from) {
    Replayed result(routes.size());
    std::vector<bool> in_part;  // a bank
    for (uint32_t expert = 0; expert < cache.experts(); ++expert) {
        const uint32_t bank = cache.bank_of(expert);
        if (bank >= in_part.size()) in_part.resize(bank + 1);
        in_part[bank] = in_part[bank] || cache.cached(expert);
    }
    std::vector<RoutedExpert> routed;
    std::vector<Load> loads;
    CacheCounters before;
    for (size_t r = 0; r < routes.size(); ++r) {
        if (r == counted_from) before = cache.counters();
        drop_unkept(cache, routed);
        if (in_part[routes.bank[r]]) {
            if (!replay_route(cache, routes, r, routed, loads)) {
                result.refused[r] = 1;
                routed.clear();
                continue;
            }
            result.misses[r] = static_cast<uint32_t>(loads.size());
            result.hits[r] = static_cast<uint32_t>(routed.size() - loads.size());
            for (const Load& load : loads) result.bytes[r] += part_bytes[cache.part_of(load.expert)];
        }
        for (const uint32_t expert : routes.wished(r)) {
            Load load;
            if (!cache.speculate(expert, load)) continue;
            ++result.early[r];
            result.early_bytes[r] += part_bytes[cache.part_of(expert)];
        }
    }
    if (counted_from >= routes.size()) before = cache.counters();
    result.counters = since(cache.counters(), before);
    return result;
}

}  // namespace moestream
