// The arena with every page source, region alignment and `dontneed`: the bytes are right whatever the pages' history, and
// each source does what it says.
#include <sys/mman.h>

#include <map>

#include "store_fixture.h"
#include "stores/page_source.h"

using namespace moestream;
using namespace moestream::test;

namespace {

constexpr uint64_t kHuge = uint64_t{2} << 20;

StoreOptions options_of(const std::string& pages, const std::string& policy) {
    StoreOptions options;
    options.reader = "threads:3";
    options.policy = policy;
    options.dense = "anon";
    options.pages = pages;
    return options;
}

size_t pages_there(const char* begin, uint64_t bytes) {
    std::vector<unsigned char> there(bytes / kPage);
    CHECK_EQ(mincore(const_cast<char*>(begin), bytes, there.data()), 0);
    return static_cast<size_t>(std::count_if(there.begin(), there.end(), [](unsigned char in) { return in & 1; }));
}

// Movable pages of the experts that are in memory, in all regions.
size_t movable_there(const Opened& arena) {
    const Geometry geometry(arena.index);
    size_t pages = 0;
    for (uint32_t t = 0; t < arena.index.tensors().size(); ++t) {
        for (uint32_t id = 0; id < arena.index.tensors()[t].count && geometry.movable_bytes(t) > 0; ++id) {
            pages += pages_there(arena.base[arena.index.tensors()[t].shard] + geometry.movable_offset(t, id),
                                 geometry.movable_bytes(t));
        }
    }
    return pages;
}

size_t budget_pages(const Opened& arena, const std::vector<uint32_t>& capacities) {
    const Geometry geometry(arena.index);
    size_t pages = 0;
    for (size_t p = 0; p < capacities.size(); ++p) pages += size_t{capacities[p]} * geometry.parts()[p].frame_pages;
    return pages;
}

void test_random_routes(const std::string& pages, const std::string& policy, uint64_t alignment, bool early) {
    const Model model;
    auto options = options_of(pages, policy);
    options.alignment = alignment;
    const std::vector<uint32_t> capacities{5, 4};
    Opened arena(model, "arena", options, capacities);
    for (const char* base : arena.base) CHECK_EQ(reinterpret_cast<uintptr_t>(base) % alignment, 0u);
    std::mt19937 random(7);
    for (uint64_t token = 0; token < 60; ++token) {
        for (uint32_t bank = 0; bank < 4; ++bank) {
            std::vector<uint32_t> wish;
            for (uint32_t i = 0; early && i < 3; ++i) wish.push_back(random() % arena.index.experts());
            CHECK(arena.layer(bank, choose(random, 1 + random() % 4, arena.index.banks()[bank].count), token, wish));
            CHECK(movable_there(arena) <= budget_pages(arena, capacities));
        }
        arena.store->end_step();
    }
    auto counts = arena.store->engagement();
    const bool drops = policy.starts_with("dontneed");
    CHECK(counts["pieces read"] > 0);
    CHECK_EQ(counts["bytes moved"] > 0, pages == "recycle");
    CHECK_EQ(counts["bytes dropped"] > 0, pages != "recycle" || drops);
    CHECK_EQ(counts["bytes populated"] > 0, pages == "populate");
    CHECK(arena.resident_is_right());
    CHECK(!arena.store->failure());
}

// After the last matmul of a route what the policy does not keep is gone, and with it its memory; its frame is free.
void test_dontneed(const std::string& pages) {
    const Model model;
    Opened arena(model, "arena", options_of(pages, "dontneed:1"), {5, 4});
    const Geometry geometry(arena.index);
    const size_t frame = geometry.parts()[0].frame_pages;
    CHECK(arena.layer(0, {0, 1, 2}, 0, {}));
    CHECK_EQ(movable_there(arena), 3 * frame);
    arena.store->end_step();
    CHECK_EQ(movable_there(arena), frame);
    for (uint64_t token = 1; token < 20; ++token) {  // frames without pages are handed out again and again
        CHECK(arena.layer(0, {3, 4, 5, 6}, token, {}));
        CHECK(arena.layer(1, {0, 1, 2, 3}, token, {}));
    }
    arena.store->end_step();
    CHECK_EQ(movable_there(arena), 2 * frame);  // the hottest of each bank
    CHECK(arena.store->engagement()["bytes dropped"] >= 19 * 6 * frame * kPage);
    // The hottest of bank 0 stayed where it was: a hit.
    const auto before = arena.store->counters();
    CHECK(arena.layer(0, {3, 4, 5, 6}, 20, {}));
    CHECK_EQ(arena.store->counters().misses - before.misses, uint64_t{3});
}

// Only whole huge pages inside a slab are advised: none of the small model's, all of these.
void test_huge_pages() {
    const Model small;
    Opened told(small, "arena", options_of("thp", "lru"), {5, 4});
    CHECK_EQ(told.fallbacks.size(), size_t{1});

    const NamedFile file(4 * 3 * kHuge + kPage, 5);
    const SlabIndex index({{file.path, file.contents.size()}}, {{"0.up", 0, 0, kPage, 3 * kHuge, 4}}, {0});
    auto options = options_of("thp", "lru");
    options.alignment = kHuge;
    std::vector<std::string> fallbacks;
    options.fallback = [&](const std::string& line) { fallbacks.push_back(line); };
    const auto store = make_store("arena", index, options);
    const auto* base = static_cast<const char*>(store->region(0));
    store->load_dense();
    store->set_capacities(std::vector<uint32_t>{2});
    for (uint32_t expert = 0; expert < 4; ++expert) {
        std::vector<RoutedExpert> routed{{expert, 1}};
        CHECK(store->route(0, routed, expert, 1) && store->wait(0));
        const uint64_t offset = index.slab_offset(0, expert);
        CHECK(std::memcmp(base + offset, file.contents.data() + offset, 3 * kHuge) == 0);
    }
    CHECK(fallbacks.empty());
    auto counts = store->engagement();
    CHECK_EQ(counts["bytes in huge pages at most"], 4 * 2 * kHuge);
    CHECK_EQ(counts["bytes dropped"], 2 * 3 * kHuge);
}

}  // namespace

int main() {
    std::vector<std::string> sources{"recycle", "fresh", "thp"};
    try {
        make_page_source("populate", {});
        sources.push_back("populate");
    } catch (const Error& error) {
        std::fprintf(stderr, "populate is not tested: %s\n", error.what());
    }
    for (const auto& pages : sources) {
        for (const char* policy : {"none", "lru", "lfu-decay:16", "dontneed:2"}) {
            test_random_routes(pages, policy, kPage, false);
            test_random_routes(pages, policy, 4 * kPage, true);
        }
        test_random_routes(pages, "lru", kHuge, true);
        test_dontneed(pages);
    }
    test_huge_pages();
    const Model model;
    CHECK_THROWS(usage, Opened(model, "arena", options_of("borrowed", "lru"), {5, 4}));
    return checks_failed();
}
