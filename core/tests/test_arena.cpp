// The arena against a small file: after any routes every slab a matmul would read holds the file's bytes, and so does
// everything that never moves; what was read is what was missed. And the page arithmetic against marking every byte.
#include <sys/mman.h>
#include <sys/resource.h>

#include "late_reader.h"
#include "store_fixture.h"

using namespace moestream;
using namespace moestream::test;

namespace {

void test_geometry() {
    const Model model;
    const SlabIndex index = model.index();
    const Geometry geometry(index);
    for (uint32_t shard = 0; shard < 2; ++shard) {
        std::vector<uint8_t> owners(model.contents(shard).size());
        for (uint32_t t = 0; t < index.tensors().size(); ++t) {
            const auto& tensor = index.tensors()[t];
            if (tensor.shard != shard) continue;
            for (uint32_t id = 0; id < tensor.count && geometry.movable_bytes(t) > 0; ++id) {
                const uint64_t begin = geometry.movable_offset(t, id);
                const uint64_t end = begin + geometry.movable_bytes(t);
                CHECK_EQ(begin % kPage, 0u);
                CHECK(begin >= index.slab_offset(t, id) && end <= index.slab_offset(t, id) + tensor.slab_bytes);
                for (uint64_t at = begin; at < end; ++at) ++owners[at];
            }
        }
        uint64_t last = 0;
        for (const auto& range : geometry.resident(shard)) {
            CHECK(range.begin >= last && range.end > range.begin);
            last = range.end;
            for (uint64_t at = range.begin; at < range.end; ++at) ++owners[at];
        }
        CHECK(std::all_of(owners.begin(), owners.end(), [](uint8_t count) { return count == 1; }));
    }
    CHECK_EQ(geometry.parts().size(), 2u);
    CHECK(geometry.parts()[0].banks == std::vector<uint32_t>{0, 1});
    CHECK_EQ(geometry.parts()[0].frame_pages, 4u);  // of 9000 bytes anywhere one whole page, of 12288 all three
    CHECK_EQ(geometry.part_of_bank(3), kNone);
}

StoreOptions options_of(const std::string& reader, const std::string& policy, bool direct) {
    StoreOptions options;
    options.reader = reader;
    options.policy = policy;
    options.dense = "anon";
    options.direct = direct;
    return options;
}

void test_random_routes(const std::string& reader, const std::string& policy, bool direct, bool early) {
    const Model model;
    Opened arena(model, "arena", options_of(reader, policy, direct), {5, 4});
    const Geometry geometry(arena.index);
    CHECK(arena.resident_is_right());
    std::mt19937 random(3);
    uint64_t missed_bytes = 0;
    uint64_t misses = 0;
    for (uint64_t token = 0; token < 80; ++token) {
        for (uint32_t bank = 0; bank < 4; ++bank) {
            const auto ids = choose(random, 1 + random() % 4, arena.index.banks()[bank].count);
            std::vector<uint32_t> wish;
            for (uint32_t i = 0; early && i < 3; ++i) wish.push_back(random() % arena.index.experts());
            CHECK(arena.layer(bank, ids, token, wish));
            const auto counters = arena.store->counters();
            if (bank < 3) {
                const auto& part = geometry.parts()[geometry.part_of_bank(bank)];
                missed_bytes += (counters.misses - misses) * part.frame_pages * kPage;
            }
            misses = counters.misses;
        }
    }
    const auto counters = arena.store->counters();
    CHECK(counters.misses > 150);
    CHECK(counters.hits > 0);
    CHECK(early ? counters.speculative_used > 0 : counters.bytes == missed_bytes);
    CHECK(arena.resident_is_right());
    CHECK(!arena.store->failure());
}

void test_everything_fits() {
    const Model model;
    Opened arena(model, "arena", options_of("sync", "lru", true), {32, 12});
    std::mt19937 random(5);
    for (uint64_t token = 0; token < 60; ++token) {
        for (uint32_t bank = 0; bank < 4; ++bank) {
            CHECK(arena.layer(bank, choose(random, 4, arena.index.banks()[bank].count), token, {}));
        }
    }
    CHECK(arena.store->counters().misses <= 44);
}

void test_a_route_wider_than_the_budget() {
    const Model model;
    Opened arena(model, "arena", options_of("sync", "lru", true), {5, 4});
    CHECK(!arena.layer(0, {0, 1, 2, 3, 4, 5}, 0, {}));
    CHECK(arena.store->failure() && arena.store->failure()->what.find("needs 6 experts at once") != std::string::npos);
    arena.store->clear_failure();
    CHECK(arena.layer(0, {0, 1, 2, 3, 4}, 0, {}));
}

// Of a shard's pages [begin, end) those that the page cache holds.
uint64_t cached_pages(const std::string& path, uint64_t begin, uint64_t end) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    void* mapped = mmap(nullptr, end - begin, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
    close(fd);
    std::vector<unsigned char> pages((end - begin) / kPage);
    CHECK_EQ(mincore(mapped, end - begin, pages.data()), 0);
    munmap(mapped, end - begin);
    return static_cast<uint64_t>(std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; }));
}

// Written back and dropped; false on a file system of memory, which keeps everything.
bool cold(const NamedFile& file) {
    const int fd = open(file.path.c_str(), O_RDWR | O_CLOEXEC);
    CHECK_EQ(fsync(fd), 0);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    return cached_pages(file.path, 0, file.contents.size() / kPage * kPage) == 0;
}

// What was read stays in the page cache if that is asked for, and what was not read is not brought along.
void test_what_stays_in_the_page_cache(const std::string& reader) {
    for (const bool keep : {false, true}) {
        const Model model;
        if (!cold(model.first) || !cold(model.second)) return;
        auto options = options_of(reader, "lru", false);
        options.keep_cached = keep;
        Opened arena(model, "arena", options, {5, 4});
        const Geometry geometry(arena.index);
        const auto cached = [&](uint32_t id) {
            const uint64_t begin = geometry.movable_offset(6, id);
            return cached_pages(model.second.path, begin, begin + geometry.movable_bytes(6));
        };
        CHECK(arena.layer(2, {0, 5}, 0, {}));
        CHECK(arena.resident_is_right());
        const uint64_t whole = geometry.movable_bytes(6) / kPage;
        CHECK_EQ(cached(0), keep ? whole : 0u);
        CHECK_EQ(cached(5), keep ? whole : 0u);
        if (keep) CHECK_EQ(cached(2), 0u);
        const auto engaged = arena.store->engagement();
        const auto left = engaged.find("slabs left in the page cache");
        CHECK_EQ(left != engaged.end(), keep);
        if (keep) CHECK_EQ(left->second, 4u);
    }
}

// The file loses its end while the model runs, and gets it back.
void test_a_file_that_ends_early(const std::string& reader, bool direct) {
    const Model model;
    Opened arena(model, "arena", options_of(reader, "lru", direct), {5, 4});
    CHECK(arena.layer(2, {0, 1}, 0, {}));
    model.second.cut(600000);
    CHECK(!arena.layer(2, {5, 6, 7}, 1, {}));
    const auto failure = arena.store->failure();
    CHECK(failure && failure->error == ENODATA);
    CHECK(failure && failure->what.find(model.second.path + " at byte ") != std::string::npos);
    CHECK(failure && failure->what.find("2.down, expert ") != std::string::npos);
    arena.store->clear_failure();
    model.second.restore();
    std::mt19937 random(9);
    for (uint64_t token = 2; token < 40; ++token) {
        for (uint32_t bank = 0; bank < 4; ++bank) {
            CHECK(arena.layer(bank, choose(random, 3, arena.index.banks()[bank].count), token, {}));
        }
    }
    CHECK(arena.resident_is_right());
}

// For as long as it lives this process may map, or write to, nothing more.
class Lowered {
  public:
    explicit Lowered(decltype(RLIMIT_AS) limit) : limit_(limit) {
        CHECK_EQ(getrlimit(limit, &before_), 0);
        const rlimit little{1 << 20, before_.rlim_max};
        CHECK_EQ(setrlimit(limit, &little), 0);
    }
    ~Lowered() { CHECK_EQ(setrlimit(limit_, &before_), 0); }
    Lowered(const Lowered&) = delete;
    Lowered& operator=(const Lowered&) = delete;

  private:
    decltype(RLIMIT_AS) limit_;
    rlimit before_{};
};

// What could not be opened is opened when it is routed again, or comes open where another expert takes its place.
void test_a_closed_arena_without_room(const std::string& reader, bool evicts) {
    const Model model;
    auto options = options_of(reader, "lru", true);
    options.closed = true;
    Opened arena(model, "arena", options, {5, 4});
    CHECK(arena.layer(0, {0, 1}, 0, {}));
    for (int again = 0; again < 2; ++again) {
        const Lowered limit(RLIMIT_DATA);
        CHECK(!arena.layer(0, {2, 3, 4}, 1, {}));
        const auto failure = arena.store->failure();
        CHECK(failure && failure->error == ENOMEM);
        CHECK(failure && failure->what.find("`ulimit -d`") != std::string::npos);
        arena.store->clear_failure();
    }
    CHECK(evicts ? arena.layer(1, {0, 1, 2, 3, 4}, 2, {}) : arena.layer(0, {2, 3, 4}, 2, {}));
    std::mt19937 random(5);
    for (uint64_t token = 3; token < 20; ++token) {
        for (uint32_t bank = 0; bank < 4; ++bank) {
            CHECK(arena.layer(bank, choose(random, 3, arena.index.banks()[bank].count), token, {}));
        }
    }
    CHECK(arena.resident_is_right());
}

// A move that failed left nothing mapped; others have mapped something there before it was ours again.
void test_a_place_that_others_have_taken() {
    const Model model;
    Opened arena(model, "arena", options_of("sync", "lru", true), {5, 4});
    CHECK(arena.layer(0, {0, 1}, 0, {}));
    {
        const Lowered limit(RLIMIT_AS);
        CHECK(!arena.layer(0, {2}, 1, {}));
    }
    const Geometry geometry(arena.index);
    char* const place = arena.base[0] + geometry.movable_offset(0, 2);
    const size_t bytes = geometry.movable_bytes(0);
    void* found = mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK_EQ(found, static_cast<void*>(place));
    if (found != place) return;
    std::fill_n(place, bytes, 'x');
    for (const uint32_t id : {2u, 3u}) {
        arena.store->clear_failure();
        CHECK(!arena.layer(0, {id}, 2, {}));
        const auto failure = arena.store->failure();
        CHECK(failure && failure->what.find("load the model again") != std::string::npos);
    }
    arena.store->clear_failure();
    arena.store->resize(std::vector<uint32_t>{0, 0});
    CHECK(std::all_of(place, place + bytes, [](char byte) { return byte == 'x'; }));
}

void test_refusals() {
    const Model model;
    CHECK_THROWS(usage, Opened(model, "arena", options_of("sync", "lru", true), {5}));
    CHECK_THROWS(usage, Opened(model, "arena", options_of("sync", "lru", true), {0, 4}));
    CHECK_THROWS(usage, Opened(model, "arena", options_of("sync", "mru", true), {5, 4}));
    CHECK_THROWS(usage, Opened(model, "arena", options_of("snyc", "lru", true), {5, 4}));
}

}  // namespace

int main() {
    test_geometry();
    std::vector<std::string> readers{"sync", "threads:3", "late"};
    if (uring_works()) readers.insert(readers.end(), {"uring:1", "uring:24"});
    for (const auto& reader : readers) {
        for (const char* policy : {"none", "lru", "lru-layer", "lfu-decay:16"}) {
            for (const bool early : {false, true}) test_random_routes(reader, policy, true, early);
        }
        test_random_routes(reader, "lru", false, true);
        test_a_file_that_ends_early(reader, true);
        test_a_file_that_ends_early(reader, false);
        for (const bool evicts : {false, true}) test_a_closed_arena_without_room(reader, evicts);
        test_what_stays_in_the_page_cache(reader);
    }
    test_everything_fits();
    test_a_route_wider_than_the_budget();
    test_a_place_that_others_have_taken();
    test_refusals();
    return test::checks_failed();
}
