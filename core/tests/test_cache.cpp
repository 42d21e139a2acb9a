// The cache's contract: pins, protection of early loads, counters, and no allocation on a route. That the victims
// are the right ones is the business of tests/unit/test_policies.py, which compares with the specification.
#include <random>

#include "allocations.h"
#include "check.h"
#include "moestream/cache.h"

using namespace moestream;

// Two banks of four in one part; expert 8 (bank 2) is in no part.
static ExpertCache small(uint32_t capacity, const char* policy = "lru") {
    return ExpertCache({{{0, 1, 2, 3, 4, 5, 6, 7}, capacity}}, {0, 0, 0, 0, 1, 1, 1, 1, 2}, policy);
}

static bool route(ExpertCache& cache, std::vector<uint32_t> experts, std::vector<Load>& loads) {
    std::vector<RoutedExpert> routed;
    for (const uint32_t e : experts) routed.push_back({e, 1});
    loads.clear();
    return cache.route(routed, 0, 1, loads);
}

static void check_loads(const std::vector<Load>& loads, const std::vector<Load>& expected, int line) {
    bool same = loads.size() == expected.size();
    for (size_t i = 0; same && i < loads.size(); ++i)
        same = loads[i].expert == expected[i].expert && loads[i].victim == expected[i].victim;
    if (!same) test::report(__FILE__, line, "loads differ", "");
}
#define CHECK_LOADS(loads, ...) check_loads(loads, std::vector<Load> __VA_ARGS__, __LINE__)

static void test_route() {
    ExpertCache cache = small(3);
    std::vector<Load> loads;
    CHECK(route(cache, {2, 0}, loads));
    CHECK_LOADS(loads, {{2, kNone}, {0, kNone}});
    CHECK(route(cache, {1, 3, 2}, loads));  // 2 is safe although it is older than 0 and comes last in the route
    CHECK_LOADS(loads, {{1, kNone}, {3, 0}});
    CHECK(!route(cache, {0, 1, 2, 3}, loads));  // wider than the part: nothing changes
    CHECK(loads.empty());
    CHECK(route(cache, {8}, loads));
    CHECK(loads.empty());
    CHECK_EQ(cache.counters().hits, 2u);
    CHECK_EQ(cache.counters().misses, 4u);
    CHECK_EQ(cache.counters().evictions, 1u);
    CHECK_EQ(cache.resident(0), 3u);
    CHECK(cache.residency(0) == Residency::absent && cache.residency(3) == Residency::resident);
    CHECK(!cache.cached(8) && cache.part_of(8) == kNone);
}

static void test_loads_are_appended() {
    ExpertCache cache = small(2);
    std::vector<Load> loads{{99, 98}};
    const RoutedExpert routed[] = {{5, 1}};
    CHECK(cache.route(routed, 0, 1, loads));
    CHECK_LOADS(loads, {{99, 98}, {5, kNone}});
}

static void test_speculation_is_protected() {
    ExpertCache cache = small(4);
    std::vector<Load> loads;
    Load load;
    route(cache, {0, 1}, loads);
    CHECK(cache.speculate(4, load) && load.expert == 4 && load.victim == kNone);
    CHECK(cache.residency(4) == Residency::speculative);
    CHECK(!cache.speculate(4, load));  // there already
    CHECK(!cache.speculate(8, load));  // always resident
    CHECK(cache.speculate(5, load));
    CHECK(!cache.speculate(6, load));  // two pinned, two protected
    route(cache, {4, 6}, loads);       // a right guess; the old route pays for the miss, the wrong guess stays
    CHECK_LOADS(loads, {{6, 0}});
    CHECK(cache.residency(4) == Residency::resident && cache.residency(5) == Residency::speculative);
    cache.release_speculative(1);
    route(cache, {2}, loads);  // 5 was never used: the first to go
    CHECK_LOADS(loads, {{2, 5}});
    CHECK_EQ(cache.counters().speculative_issued, 2u);
    CHECK_EQ(cache.counters().speculative_used, 1u);
    CHECK_EQ(cache.counters().speculative_wasted, 1u);
    CHECK_EQ(cache.counters().hits, 1u);
}

static void test_demand_outranks_protection() {
    ExpertCache cache = small(3);
    std::vector<Load> loads;
    Load load;
    for (const uint32_t e : {5u, 4u, 6u}) CHECK(cache.speculate(e, load));
    CHECK(route(cache, {0, 1}, loads));
    CHECK_LOADS(loads, {{0, 5}, {1, 4}});
    CHECK_EQ(cache.counters().speculative_wasted, 2u);
    CHECK(route(cache, {6, 7, 4}, loads));
    CHECK_LOADS(loads, {{7, 0}, {4, 1}});
}

static void test_cancel_frees_the_frame() {
    ExpertCache cache = small(1);
    std::vector<Load> loads;
    Load load;
    route(cache, {0}, loads);
    CHECK(!cache.speculate(4, load));  // the only expert is pinned
    cache.unpin_route();
    CHECK(cache.speculate(4, load) && load.victim == 0);
    CHECK_THROWS(internal, cache.cancel(0));
    cache.cancel(4);
    CHECK_EQ(cache.resident(0), 0u);
    CHECK_EQ(cache.counters().speculative_issued, 0u);
    CHECK_EQ(cache.counters().speculative_wasted, 0u);
    route(cache, {0}, loads);
    CHECK_LOADS(loads, {{0, kNone}});
}

static void test_parts_do_not_share() {
    ExpertCache cache({{{0, 1, 2}, 1}, {{3, 4, 5}, 2}}, {0, 0, 0, 1, 1, 1}, "lfu-decay:16");
    std::vector<Load> loads;
    route(cache, {0}, loads);
    route(cache, {3, 4}, loads);
    route(cache, {1}, loads);
    CHECK_LOADS(loads, {{1, 0}});
    CHECK_EQ(cache.resident(0), 1u);
    CHECK_EQ(cache.resident(1), 2u);
    CHECK(!route(cache, {0, 1}, loads));
}

static void test_constructor_validates() {
    const std::vector<uint32_t> banks{0, 0, 1};
    using Parts = std::vector<ExpertCache::Part>;
    for (const Parts& bad : {Parts{{{}, 0}}, Parts{{{0, 1}, 0}}, Parts{{{0, 1}, 3}}, Parts{{{1, 0}, 1}},
                             Parts{{{0, 0}, 1}}, Parts{{{0, 3}, 1}}, Parts{{{0, 1}, 1}, {{1, 2}, 1}},
                             Parts{{{0}, 1}, {{1, 2}, 1}}})
        CHECK_THROWS(usage, ExpertCache(bad, banks, "lru"));
    CHECK_THROWS(usage, ExpertCache({{{0, 1}, 1}}, banks, "mru"));
    ExpertCache dense({}, {}, "lru");  // a model without experts
    CHECK_EQ(dense.experts(), 0u);
}

static void test_nothing_is_allocated(const char* policy) {
    constexpr uint32_t kBanks = 6, kEach = 16;
    ExpertCache::Part part{{}, 20};
    std::vector<uint32_t> bank_of;
    for (uint32_t e = 0; e < kBanks * kEach; ++e) part.experts.push_back(e), bank_of.push_back(e / kEach);
    ExpertCache cache({part}, bank_of, policy);
    std::mt19937 rng(11);
    std::vector<Load> loads;
    loads.reserve(kEach);
    RoutedExpert routed[4];
    Load load;
    const size_t before = allocations;
    for (uint64_t step = 0; step < 3000; ++step) {
        const uint32_t bank = static_cast<uint32_t>(step % kBanks);
        for (uint32_t i = 0; i < 4; ++i) routed[i] = {bank * kEach + 4 * i + static_cast<uint32_t>(rng() % 4), 1};
        loads.clear();
        CHECK(cache.route(routed, step / kBanks, 1, loads));
        cache.release_speculative(bank);
        const uint32_t guess = (bank + 1) % kBanks * kEach + static_cast<uint32_t>(rng() % kEach);
        if (cache.speculate(guess, load) && rng() % 8 == 0) cache.cancel(guess);
    }
    CHECK_EQ(allocations, before);
    const CacheCounters& c = cache.counters();
    CHECK_EQ(c.hits + c.misses, 3000u * 4);
    CHECK(cache.resident(0) + 1 >= 20u);  // the last guess may have been taken back
    CHECK(c.speculative_used > 0 && c.speculative_wasted > 0);
}

int main() {
    test_route();
    test_loads_are_appended();
    test_speculation_is_protected();
    test_demand_outranks_protection();
    test_cancel_frees_the_frame();
    test_parts_do_not_share();
    test_constructor_validates();
    for (const char* policy : {"none", "lru", "lru-layer", "lfu-decay:16"}) test_nothing_is_allocated(policy);
    return test::checks_failed();
}
