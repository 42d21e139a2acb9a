// cow and shared against a small file: what a route needs is copied over the mapping (which is spoilt first, so that
// bytes that were already there do not count), again after an eviction and after a failed read; nothing reaches the file.
#include <sys/mman.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <set>

#include "store_fixture.h"
#include "stores/file_copy.h"

using namespace moestream;
using namespace moestream::test;

namespace {

// An empty directory that is not there yet, gone with the object.
struct Directory {
    std::string path = std::string(getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/tmp") + "/moestream-copy-" +
                       std::to_string(getpid()) + "/deeper";
    ~Directory() { std::filesystem::remove_all(std::filesystem::path(path).parent_path()); }
    bool empty() const { return std::filesystem::is_empty(path); }
};

StoreOptions options_of(const std::string& reader, const std::string& policy, bool direct, const Directory& directory) {
    StoreOptions options;
    options.reader = reader;
    options.policy = policy;
    options.dense = "mapped";
    options.direct = direct;
    options.copy_dir = directory.path;
    return options;
}

char* movable(const Opened& opened, uint32_t tensor, uint32_t id) {
    const Geometry geometry(opened.index);
    return opened.base[opened.index.tensors()[tensor].shard] + geometry.movable_offset(tensor, id);
}

void spoil_everything(const Opened& opened) {
    const Geometry geometry(opened.index);
    for (uint32_t t = 0; t < opened.index.tensors().size(); ++t) {
        for (uint32_t id = 0; id < opened.index.tensors()[t].count; ++id) {
            std::memset(movable(opened, t, id), 0x5a, geometry.movable_bytes(t));
        }
    }
}

std::string read_back(const NamedFile& file) {
    std::ifstream stream(file.path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
}

uint64_t frame_bytes(const Opened& opened, uint32_t bank) {
    const Geometry geometry(opened.index);
    const uint32_t part = geometry.part_of_bank(bank);
    return part == kNone ? 0 : uint64_t{geometry.parts()[part].frame_pages} * kPage;
}

void test_random_routes(const std::string& store, StoreOptions options, const Directory& directory) {
    const Model model;
    Opened opened(model, store, std::move(options), {5, 4});
    CHECK(opened.resident_is_right());
    spoil_everything(opened);
    std::mt19937 random(3);
    std::set<std::pair<uint32_t, uint32_t>> touched;
    uint64_t missed_bytes = 0, misses = 0;
    for (uint64_t token = 0; token < 60; ++token) {
        for (uint32_t bank = 0; bank < 4; ++bank) {
            const auto ids = choose(random, 1 + random() % 4, opened.index.banks()[bank].count);
            for (const uint32_t id : ids) touched.emplace(bank, id);
            CHECK(opened.layer(bank, ids, token, {}));
            missed_bytes += (opened.store->counters().misses - misses) * frame_bytes(opened, bank);
            misses = opened.store->counters().misses;
        }
    }
    uint64_t touched_bytes = 0;
    for (const auto& [bank, id] : touched) touched_bytes += frame_bytes(opened, bank);
    const auto counters = opened.store->counters();
    auto engaged = opened.store->engagement();
    CHECK(counters.misses > 100 && counters.hits > 0);
    CHECK_EQ(counters.bytes, missed_bytes);
    CHECK_EQ(engaged["bytes copied"], missed_bytes);
    CHECK_EQ(engaged["bytes written at least once"], touched_bytes);
    CHECK(engaged["pieces read"] > 0);
    CHECK(opened.resident_is_right());
    CHECK(!opened.store->failure());
    if (store == "shared") {
        CHECK_EQ(engaged["bytes of the file's copy"], model.first.contents.size() + model.second.contents.size());
        CHECK(directory.empty());
    }
    CHECK(read_back(model.first) == model.first.contents && read_back(model.second) == model.second.contents);
}

// An evicted expert is only forgotten: its next route reads and copies it again.
void test_eviction_forgets(const std::string& store) {
    const Model model;
    const Directory directory;
    Opened opened(model, store, options_of("sync", "lru", true, directory), {2, 2});
    CHECK(opened.layer(0, {0, 1}, 0, {}));
    std::memset(movable(opened, 0, 0), 0x5a, kPage);  // found in the cache: left alone
    std::vector<RoutedExpert> routed{{0, 1}};
    CHECK(opened.store->route(0, routed, 1, 1) && opened.store->wait(0));
    CHECK(!opened.slab_is_right(0, 0));
    CHECK(opened.layer(0, {2, 3}, 2, {}));
    CHECK(opened.layer(0, {0, 1}, 3, {}));
    CHECK_EQ(opened.store->counters().misses, uint64_t{6});
}

void test_growth_stops() {
    const Model model;
    const Directory directory;
    const Geometry geometry(model.index());
    Opened cow(model, "cow", options_of("sync", "lru", true, directory), {2, 2});
    cow.store->limit_growth(uint64_t{3} * geometry.parts()[0].frame_pages * kPage);
    CHECK(cow.layer(0, {0, 1}, 0, {}));
    CHECK(cow.layer(0, {2}, 1, {}));
    CHECK(cow.layer(0, {0, 1}, 2, {}));  // read again, and not one page more
    CHECK(cow.layer(0, {2, 0}, 3, {}));
    const auto before = cow.store->counters();
    CHECK(!cow.layer(0, {3}, 4, {}));
    const auto failure = cow.store->failure();
    CHECK(failure && failure->error == 0 && failure->what.find("keeps every page it has written") != std::string::npos);
    CHECK_EQ(cow.store->counters().bytes, before.bytes);
    CHECK_EQ(cow.store->counters().misses, before.misses);
    cow.store->clear_failure();
    CHECK(cow.layer(0, {0, 2}, 5, {}));
}

// The file loses its end while the model runs, and gets it back, before any matmul has touched what was lost.
void test_a_file_that_ends_early(const std::string& store, const std::string& reader) {
    const Model model;
    const Directory directory;
    Opened opened(model, store, options_of(reader, "lru", true, directory), {5, 4});
    spoil_everything(opened);
    CHECK(opened.layer(2, {0, 1}, 0, {}));
    model.second.cut(600000);
    std::vector<RoutedExpert> routed;
    for (const uint32_t id : {5u, 6u, 7u}) routed.push_back({opened.index.banks()[2].first_expert + id, 1});
    bool good = opened.store->route(2, routed, 1, 1);
    for (const uint32_t tensor : opened.index.banks()[2].tensors) good = good && opened.store->wait(tensor);
    CHECK(!good);
    const auto failure = opened.store->failure();
    CHECK(failure && failure->error == ENODATA);
    CHECK(failure && failure->what.find(model.second.path + " at byte ") != std::string::npos);
    CHECK(failure && failure->what.find("2.down, expert ") != std::string::npos);
    opened.store->clear_failure();
    model.second.restore();
    // What the cache holds only in name is read when it is routed.
    CHECK(opened.layer(2, {5, 6, 7}, 2, {}));
}

// cow shows the file itself, the pages it has written too: with its end gone they are gone.
void test_a_page_that_is_lost() {
    const Model model;
    const Directory directory;
    Opened opened(model, "cow", options_of("sync", "lru", true, directory), {5, 4});
    CHECK(opened.layer(2, {0, 11}, 0, {}));
    model.second.cut(600000);
    CHECK(!opened.store->failure());
    const volatile char* lost = movable(opened, 6, 11);
    CHECK_EQ(*lost, 0);
    const auto failure = opened.store->failure();
    CHECK(failure && failure->error == ENODATA && !failure->dense_at);
    CHECK(failure && failure->what.find("(2.down, expert 11): the file ends early; load the model again") !=
                         std::string::npos);
    opened.store->clear_failure();
    CHECK(opened.store->failure().has_value());
}

void test_no_room() {
    const Model model;
    const Directory directory;
    CHECK_THROWS(refused, require_room(directory.path, uint64_t{1} << 60));
    require_room(directory.path, 1);
    // A sparse file larger than any disk here: refused before anything is copied.
    NamedFile sparse(kPage, 1);
    const uint64_t bytes = uint64_t{15} << 40;
    if (truncate(sparse.path.c_str(), static_cast<off_t>(bytes)) != 0) return;
    const SlabIndex index({{sparse.path, bytes}}, {{"0.up", 0, 0, 0, 8192, 4}}, {0});
    std::string what;
    uint64_t copied = 0;
    try {
        auto options = options_of("sync", "lru", true, directory);
        options.fallback = [](const std::string&) {};
        options.progress = [&](uint64_t done, uint64_t) { copied = done; };
        make_store("shared", index, options);
    } catch (const Error& error) {
        what = error.what();
    }
    CHECK(what.find("has room for") != std::string::npos && what.find("XDG_CACHE_HOME") != std::string::npos);
    CHECK_EQ(copied, uint64_t{0});
    CHECK(directory.empty());
}

void test_refusals() {
    const Model model;
    const Directory directory;
    for (const std::string store : {"cow", "shared"}) {
        CHECK_THROWS(usage, Opened(model, store, options_of("sync", "lru", true, directory), {5}));
        CHECK_THROWS(usage, Opened(model, store, options_of("snyc", "lru", true, directory), {5, 4}));
        auto anon = options_of("sync", "lru", true, directory);
        anon.dense = "anon";
        CHECK_THROWS(usage, Opened(model, store, anon, {5, 4}));
        Opened opened(model, store, options_of("sync", "lru", true, directory), {5, 4});
        CHECK(!opened.layer(0, {0, 1, 2, 3, 4, 5}, 0, {}));
        CHECK(opened.store->failure() && opened.store->failure()->what.find("needs 6 experts") != std::string::npos);
        opened.store->clear_failure();
        CHECK(opened.layer(0, {0, 1, 2, 3, 4}, 0, {}));
    }
    auto nowhere = options_of("sync", "lru", true, directory);
    nowhere.copy_dir = "/proc/no/such/place";
    CHECK_THROWS(refused, Opened(model, "shared", nowhere, {5, 4}));
}

// llama.cpp has mapped the file itself: the store is laid over that mapping.
void test_adopted(const std::string& store) {
    const Model model;
    const Directory directory;
    const SlabIndex index = model.index();
    auto options = options_of("sync", "lru", true, directory);
    options.fallback = [](const std::string&) {};
    const auto made = make_store(store, index, options);
    std::vector<char*> bases;
    for (uint32_t shard = 0; shard < 2; ++shard) {
        const auto bytes = model.contents(shard).size();
        const int fd = open(index.shards()[shard].path.c_str(), O_RDONLY);
        void* base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        CHECK(base != MAP_FAILED);
        bases.push_back(static_cast<char*>(base));
        made->adopt(shard, {bases[shard], kPage, bytes});
    }
    made->load_dense();
    made->set_capacities(std::vector<uint32_t>{5, 4});
    const Geometry geometry(index);
    char* slab = bases[1] + geometry.movable_offset(1, 3);
    std::memset(slab, 0x5a, kPage);
    std::vector<RoutedExpert> routed{{3, 1}};
    CHECK(made->route(0, routed, 0, 1) && made->wait(0) && made->wait(1));
    CHECK(std::memcmp(slab, model.contents(1).data() + geometry.movable_offset(1, 3), kPage) == 0);
    CHECK(read_back(model.second) == model.second.contents);
    for (uint32_t shard = 0; shard < 2; ++shard) munmap(bases[shard], model.contents(shard).size());
}

}  // namespace

int main() {
    std::vector<std::string> readers{"sync", "threads:3x2"};
    if (uring_works()) readers.insert(readers.end(), {"uring:1", "uring:24x4"});
    for (const std::string store : {"cow", "shared"}) {
        for (const auto& reader : readers) {
            for (const char* policy : {"none", "lru", "lfu-decay:16"}) {
                const Directory directory;
                test_random_routes(store, options_of(reader, policy, true, directory), directory);
            }
            const Directory directory;
            auto buffered = options_of(reader, "lru", false, directory);
            buffered.alignment = 16384;
            test_random_routes(store, buffered, directory);
            test_a_file_that_ends_early(store, reader);
        }
        test_eviction_forgets(store);
        test_adopted(store);
    }
    test_growth_stops();
    test_a_page_that_is_lost();
    test_no_room();
    test_refusals();
    return checks_failed();
}
