// Policies by themselves: what the step-by-step comparison with the Python specification does not show, such as
// the verbs in unusual orders, the error texts' kinds, and that nothing is allocated after construction.
#include <algorithm>
#include <random>
#include <set>

#include "allocations.h"
#include "check.h"
#include "moestream/policy.h"

using namespace moestream;

static const char* const kPolicies[] = {"none",  "fifo",   "lru",        "lru-layer",  "lfu",        "lfu-decay",
                                        "sieve", "s3fifo", "dontneed:0", "dontneed:2", "lfu-decay:4", "lfu-adapt"};

static PolicyShape shape(uint32_t experts, uint32_t capacity, uint32_t banks) {
    PolicyShape out{experts, capacity, {}, banks, {}};
    for (uint32_t e = 0; e < experts; ++e) out.bank_of.push_back(e * banks / experts);
    return out;
}

static void test_names() {
    for (const char* name : kPolicies) CHECK(make_policy(name, shape(8, 4, 2)) != nullptr);
    for (const char* bad : {"", "lur", "lru:1", "none:x", "lru-layer:2", "lfu-decay:", "lfu-decay:x", "lfu-decay:0.5",
                            "lfu-decay:nan", "lfu-decay:inf", "lfu-decay:-3", "lfu-decay:16 "})
        CHECK_THROWS(usage, make_policy(bad, shape(8, 4, 2)));
    CHECK_THROWS(usage, make_policy("lru", shape(8, 0, 2)));
    CHECK_THROWS(usage, make_policy("lru", shape(8, 9, 2)));
    CHECK_THROWS(usage, make_policy("lru", PolicyShape{2, 1, {0, 1}, 1, {}}));
    CHECK_THROWS(usage, make_policy("lru", PolicyShape{2, 1, {0}, 1, {}}));
}

// Pins, admissions and departures in any order: a victim is resident and unpinned whenever there is such an expert.
static void test_victims_are_candidates(const char* name) {
    constexpr uint32_t kExperts = 24;
    const auto policy = make_policy(name, shape(kExperts, 12, 4));
    std::mt19937 rng(7);
    std::set<uint32_t> resident, pinned;
    const size_t before = allocations;
    size_t own = 0;  // allocations of the test's own sets
    for (uint64_t step = 0; step < 20000; ++step) {
        const uint32_t e = rng() % kExperts;
        const size_t at = allocations;
        const bool in = resident.count(e) != 0, pin = pinned.count(e) != 0;
        const uint32_t verb = rng() % 4;
        if (verb == 1) in ? resident.erase(e) : resident.insert(e).second;
        if (verb == 2) pin ? pinned.erase(e) : pinned.insert(e).second;
        own += allocations - at;
        if (verb == 0) policy->use(e, {step, 1 + static_cast<uint32_t>(rng() % 3), 1});
        if (verb == 1) in ? policy->forget(e) : policy->admit(e);
        if (verb == 2) policy->pin(e, !pin);
        if (verb == 3) policy->pin(e, pin);  // what already holds may be said again
        const uint32_t victim = policy->victim(e);
        const bool any = std::any_of(resident.begin(), resident.end(), [&](uint32_t r) { return !pinned.count(r); });
        CHECK_EQ(victim != kNone, any);
        if (victim != kNone) CHECK(resident.count(victim) != 0 && pinned.count(victim) == 0);
        if (test::failures() > 0) return;
    }
    CHECK_EQ(allocations - before, own);
}

static void test_lru_order() {
    const auto policy = make_policy("lru", shape(6, 4, 1));
    for (const uint32_t e : {3u, 1u, 2u}) policy->use(e, {}), policy->admit(e);
    CHECK_EQ(policy->victim(0), 3u);
    policy->admit(5);  // loaded, never used: the first to go
    CHECK_EQ(policy->victim(0), 5u);
    policy->pin(5, true);
    policy->use(3, {});
    CHECK_EQ(policy->victim(0), 1u);
    policy->pin(1, true);
    policy->pin(1, false);  // a pin is no use: the place in the order is the old one
    CHECK_EQ(policy->victim(0), 1u);
    policy->forget(1);
    CHECK_EQ(policy->victim(0), 2u);
    policy->pin(5, false);
    CHECK_EQ(policy->victim(0), 5u);
}

static void test_lru_layer_shares() {
    // Banks {0..3} and {4..7}; five frames: quotas 3 and 2.
    const auto policy = make_policy("lru-layer", shape(8, 5, 2));
    for (const uint32_t e : {4u, 5u, 6u, 0u, 1u}) policy->use(e, {}), policy->admit(e);
    CHECK_EQ(policy->victim(7), 4u);  // its own bank is above its quota
    CHECK_EQ(policy->victim(2), 4u);  // bank 0 is below: the bank above pays
    policy->forget(4);
    policy->use(2, {});
    policy->admit(2);
    CHECK_EQ(policy->victim(3), 0u);  // both at quota: each pays for itself
    CHECK_EQ(policy->victim(4), 5u);
    for (const uint32_t e : {0u, 1u, 2u}) policy->pin(e, true);
    CHECK_EQ(policy->victim(3), 5u);  // all of its own pinned and nobody above: the oldest of all
}

static void test_lfu_remembers_the_absent() {
    const auto policy = make_policy("lfu-decay:16", shape(4, 2, 1));
    for (uint64_t t = 0; t < 4; ++t) policy->use(0, {t, 1, 1});
    policy->admit(0);
    policy->forget(0);
    policy->use(1, {4, 1, 1});
    policy->admit(1);
    policy->admit(0);  // comes back with its history
    CHECK_EQ(policy->victim(2), 1u);
    policy->use(1, {2, 1, 1});  // a clock that went back does not make the future grow: it counts as now
    policy->use(1, {4, 1, 1});
    policy->use(1, {4, 1, 4});
    CHECK_EQ(policy->victim(2), 0u);
}

static void test_sieve_sweeps() {
    const auto policy = make_policy("sieve", shape(6, 4, 1));
    for (const uint32_t e : {0u, 1u, 2u, 3u}) policy->admit(e), policy->use(e, {});
    policy->use(0, {});  // the first is used again: the hand clears it and takes the second
    CHECK_EQ(policy->victim(4), 1u);
    CHECK_EQ(policy->victim(4), 1u);  // naming it again changes nothing
    policy->forget(1);
    policy->admit(4);
    policy->pin(2, true);  // passed, and not for good
    CHECK_EQ(policy->victim(5), 3u);
    policy->forget(3);
    policy->pin(2, false);
    CHECK_EQ(policy->victim(5), 4u);  // loaded and not used: nothing protects it but the hand's place
    policy->forget(4);
    CHECK_EQ(policy->victim(5), 0u);  // around: its bit is gone
}

static void test_s3fifo_trial() {
    // Twenty frames: two on trial. The first victim is named when all are taken.
    const auto policy = make_policy("s3fifo", shape(40, 20, 1));
    for (uint32_t e = 0; e < 20; ++e) policy->admit(e), policy->use(e, {});
    CHECK_EQ(policy->victim(20), 0u);  // the trial's oldest, not used again
    policy->forget(0);
    policy->admit(20), policy->use(20, {});
    for (int i = 0; i < 2; ++i) policy->use(1, {});  // twice more: it passes
    CHECK_EQ(policy->victim(21), 20u);
    policy->forget(20);
    policy->admit(21), policy->use(21, {});
    CHECK_EQ(policy->victim(0), 2u);  // the main queue is one over its share and gives its oldest
    policy->forget(2);
    policy->admit(0), policy->use(0, {});  // remembered: it need not pass again, and the main queue is over again
    CHECK_EQ(policy->victim(22), 3u);
}

static void test_pinned_keeps_the_hottest() {
    // Two banks of four, six frames: two may be kept, four are for any route.
    PolicyShape seeded = shape(8, 6, 2);
    CHECK_THROWS(usage, make_policy("pinned:FILE", seeded));
    seeded.priority = {0, 5, 1, 0, 9, 0, 5, 0};
    const auto policy = make_policy("pinned:FILE", seeded);
    for (const uint32_t e : {1u, 4u, 6u, 0u}) policy->admit(e), policy->use(e, {});
    CHECK_EQ(policy->victim(2), 6u);  // 4 and 1 are the hottest; of the equals 1 and 6 the lower number is kept
    policy->forget(6);
    CHECK_EQ(policy->victim(2), 0u);
    policy->forget(0);
    CHECK_EQ(policy->victim(2), kNone);
}

static void test_dontneed_keeps_the_hot() {
    const auto policy = make_policy("dontneed:1", shape(6, 4, 2));
    for (uint32_t e = 0; e < 6; ++e) CHECK(!policy->keep(e));
    policy->use(0, {0, 1, 1});
    CHECK(policy->keep(0));
    policy->use(1, {0, 1, 2});  // hotter: takes its place
    policy->use(4, {0, 1, 1});  // of the other bank
    CHECK(!policy->keep(0) && policy->keep(1) && policy->keep(4));
    const auto none = make_policy("dontneed:0", shape(6, 4, 2));
    none->use(0, {});
    CHECK(!none->keep(0));
    CHECK(make_policy("lru", shape(6, 4, 2))->keep(0));
}

int main() {
    test_names();
    test_sieve_sweeps();
    test_s3fifo_trial();
    test_pinned_keeps_the_hottest();
    test_dontneed_keeps_the_hot();
    for (const char* name : kPolicies) test_victims_are_candidates(name);
    test_lru_order();
    test_lru_layer_shares();
    test_lfu_remembers_the_absent();
    return test::checks_failed();
}
