// The mapped store against a small file: every slab a matmul would read holds the file's bytes whatever lies over the
// mapping, what is dropped after use is gone and what is kept is not, and trouble ends in a failure, not in a signal.
#include <sys/mman.h>

#include <map>
#include <random>

#include "moestream/geometry.h"
#include "moestream/store.h"
#include "reader_fixture.h"

using namespace moestream;
using namespace moestream::test;

namespace {

constexpr uint64_t kFile = 3 << 20;

// Three banks of sixteen experts, two slabs each; dense bytes before, between and behind them.
class Mapped {
  public:
    explicit Mapped(StoreOptions options) : file_(kFile) {
        index_ = std::make_unique<SlabIndex>(
            std::vector<Shard>{{path(), kFile}},
            std::vector<ExpertTensor>{{"0.up", 0, 0, 10'000, 30'000, 16},
                                      {"0.down", 0, 0, 500'000, 20'480, 16},
                                      {"1.up", 1, 0, 900'000, 30'000, 16},
                                      {"1.down", 1, 0, 1'400'832, 20'480, 16},
                                      {"2.up", 2, 0, 1'800'001, 30'000, 16},
                                      {"2.down", 2, 0, 2'400'000, 20'480, 16}},
            std::vector<int32_t>{0, 1, 2});
        if (options.policy.empty()) options.policy = "none";
        if (options.dense.empty()) options.dense = "mapped";
        options.fallback = [this](const std::string& line) { fallbacks.push_back(line); };
        const int fd = open(path().c_str(), O_RDWR | O_CLOEXEC);
        CHECK_EQ(fsync(fd), 0);  // pages that were never written back cannot be dropped
        close(fd);
        // Nor can a page whose large folio, of an earlier write, has another page that is locked.
        CHECK_EQ(posix_fadvise(file_.buffered(), 0, 0, POSIX_FADV_DONTNEED), 0);
        store = make_store("mapped", *index_, options);
        base = static_cast<char*>(store->region(0));
        store->load_dense();
    }
    std::string path() const { return "/proc/self/fd/" + std::to_string(file_.buffered()); }
    // Of pages that may be locked or memory of the store's own nothing is taken.
    void cold() const {
        const Geometry geometry(*index_);
        for (uint32_t tensor = 0; tensor < index_->tensors().size(); ++tensor) {
            for (uint32_t id = 0; id < 16; ++id) {
                char* pages = base + geometry.movable_offset(tensor, id);
                CHECK_EQ(madvise(pages, geometry.movable_bytes(tensor), MADV_DONTNEED), 0);
            }
        }
        CHECK_EQ(posix_fadvise(file_.buffered(), 0, 0, POSIX_FADV_DONTNEED), 0);
    }
    void cut(uint64_t bytes) const {
        const int fd = open(path().c_str(), O_RDWR | O_CLOEXEC);
        CHECK_EQ(ftruncate(fd, static_cast<off_t>(bytes)), 0);
        close(fd);
    }
    void restore() const {
        const int fd = open(path().c_str(), O_RDWR | O_CLOEXEC);
        CHECK_EQ(pwrite(fd, pattern().data(), kFile, 0), ssize_t{kFile});
        close(fd);
    }
    bool right(uint32_t tensor, uint32_t id) const {
        const uint64_t offset = index_->slab_offset(tensor, id);
        return is_pattern(reinterpret_cast<uint8_t*>(base + offset), offset, index_->tensors()[tensor].slab_bytes);
    }
    // One layer as the hook runs it. False when it failed.
    bool layer(uint32_t bank, const std::vector<uint32_t>& ids, uint64_t token = 0,
               const std::vector<uint32_t>& early = {}) {
        std::vector<RoutedExpert> routed;
        for (const uint32_t id : ids) routed.push_back({index_->banks()[bank].first_expert + id, 1});
        if (!store->route(bank, routed, token, 1)) return false;
        for (const uint32_t tensor : index_->banks()[bank].tensors) {
            if (!store->wait(tensor)) return false;
            for (const uint32_t id : ids) CHECK(right(tensor, id));
            if (tensor == index_->banks()[bank].tensors.front()) store->speculate(early);
        }
        return true;
    }
    // Whole pages of a bank's slabs that are in memory, of the experts for which `which` says so.
    template <class Which>
    uint64_t resident(uint32_t bank, Which which) const {
        const Geometry geometry(*index_);
        uint64_t count = 0;
        for (const uint32_t tensor : index_->banks()[bank].tensors) {
            for (uint32_t id = 0; id < 16; ++id) {
                if (!which(id)) continue;
                std::vector<unsigned char> pages(geometry.movable_bytes(tensor) / kPage);
                mincore(base + geometry.movable_offset(tensor, id), pages.size() * kPage, pages.data());
                count += static_cast<uint64_t>(std::count_if(pages.begin(), pages.end(), [](auto p) { return p & 1; }));
            }
        }
        return count;
    }
    uint64_t pages_an_expert(uint32_t bank) const {
        const Geometry geometry(*index_);
        return geometry.parts()[geometry.part_of_bank(bank)].frame_pages;
    }
    const SlabIndex& index() const { return *index_; }

    std::vector<std::string> fallbacks;
    char* base = nullptr;

  private:
    PatternFile file_;
    std::unique_ptr<SlabIndex> index_;

  public:
    std::unique_ptr<Store> store;  // ends before the file
};

StoreOptions reading(const std::string& reader, const std::string& policy = "none",
                     const std::string& dense = "mapped") {
    StoreOptions options;
    options.reader = reader;
    options.policy = policy;
    options.dense = dense;
    return options;
}

bool can(const StoreOptions& options) {
    try {
        Mapped model(options);
        return true;
    } catch (const Error& error) {
        if (error.kind != ErrorKind::unsupported) throw;
        std::fprintf(stderr, "skipping %s: %s\n", options.reader.c_str(), error.what());
        return false;
    }
}

void test_random_routes(StoreOptions options) {
    options.speculative = true;
    if (!can(options)) return;
    Mapped model(options);
    std::mt19937 random(3);
    for (uint64_t token = 0; token < 25; ++token) {
        for (uint32_t bank = 0; bank < 3; ++bank) {
            std::vector<uint32_t> ids, early;
            for (uint32_t id = 0; id < 16; ++id) {
                if (random() % 3 == 0) ids.push_back(id);
                if (random() % 4 == 0) early.push_back((bank + 1) % 3 * 16 + id);
            }
            if (ids.empty()) ids.push_back(5);
            if (token % 7 == 0 && bank == 0) model.cold();
            CHECK(model.layer(bank, ids, token, early));
        }
        model.store->end_step();
    }
    CHECK(!model.store->failure());
    CHECK(is_pattern(reinterpret_cast<uint8_t*>(model.base), 0, kFile));
    uint64_t done = 0;
    for (const auto& [name, count] : model.store->engagement()) done += count;
    CHECK(options.reader == "fault" || done > 0);
}

StoreOptions dropping(const std::string& reader, const std::string& hot, const std::string& dense) {
    StoreOptions options = reading(reader, "dontneed:" + hot, dense);
    options.advice = "random";  // else a fault's read-ahead may still be on its way when its pages are dropped
    return options;
}

// The experts of bank 0 used most of late are 3 and 4; then 5 is used so often that it displaces one of them.
void test_what_is_not_hot_is_dropped(const std::string& reader, const std::string& dense) {
    Mapped model(dropping(reader, "2", dense));
    model.cold();
    const uint64_t each = model.pages_an_expert(0);
    CHECK(model.layer(0, {3, 4}));
    for (uint64_t token = 1; token < 5; ++token) {
        CHECK(model.layer(0, {3, 4, 7 + static_cast<uint32_t>(token)}, token));
        CHECK_EQ(model.resident(0, [&](uint32_t id) { return id == 3 || id == 7 + token; }), 2 * each);
        CHECK(model.layer(1, {1, 2, 3}, token));  // now bank 0 is over
        CHECK_EQ(model.resident(0, [](uint32_t id) { return id == 3 || id == 4; }), 2 * each);
        CHECK_EQ(model.resident(0, [](uint32_t id) { return id != 3 && id != 4; }), 0u);
        model.store->end_step();
        CHECK_EQ(model.resident(1, [](uint32_t) { return true; }), 2 * model.pages_an_expert(1));
    }
    for (uint64_t token = 5; token < 17; ++token) {
        CHECK(model.layer(0, {4, 5}, token));
        model.store->end_step();
    }
    CHECK_EQ(model.resident(0, [](uint32_t id) { return id == 4 || id == 5; }), 2 * each);
    CHECK_EQ(model.resident(0, [](uint32_t id) { return id != 4 && id != 5; }), 0u);  // 3 has left
    CHECK(model.store->engagement().at("bytes dropped after use") >= 8 * each * kPage);
}

void test_nothing_routed_stays(const std::string& reader, const std::string& dense) {
    if (!can(dropping(reader, "0", dense))) return;
    Mapped model(dropping(reader, "0", dense));
    model.cold();
    for (uint32_t bank = 0; bank < 3; ++bank) CHECK(model.layer(bank, {0, 5, 15}));
    model.store->end_step();
    for (uint32_t bank = 0; bank < 3; ++bank) CHECK_EQ(model.resident(bank, [](uint32_t) { return true; }), 0u);
}

void test_a_shrunk_file_is_a_failure(const std::string& reader) {
    if (!can(reading(reader))) return;
    Mapped model(reading(reader));
    CHECK(model.layer(2, {1, 2}));
    model.cut(2'000'000);
    CHECK(!model.layer(2, {1, 7}));
    const auto failure = model.store->failure();
    CHECK(failure && failure->error == ENODATA);
    CHECK(failure && failure->what == model.path() + " at byte 2010001 (2.up, expert 7): the file ends early");
    model.store->clear_failure();
    model.restore();
    for (uint32_t bank = 0; bank < 3; ++bank) CHECK(model.layer(bank, {1, 7, 15}));
}

// Behind every check, where a matmul is already at it.
void test_a_page_that_is_lost_is_a_failure_for_good(const std::string& reader) {
    struct Touch {
        uint64_t offset;
        const char* what;
        std::optional<std::pair<uint32_t, uint64_t>> dense_at;
    };
    for (const Touch& touch : {Touch{2'070'005, " (2.up, expert 9)", {}}, Touch{3'000'000, "", {{0, 3'000'000}}}}) {
        Mapped model(reading(reader));
        CHECK(model.layer(2, {1, 2}));
        CHECK(!model.store->failure());
        model.cut(2'000'000);
        CHECK_EQ(static_cast<volatile char*>(model.base)[touch.offset], 0);
        const auto failure = model.store->failure();
        CHECK(failure && failure->error == ENODATA && failure->dense_at == touch.dense_at);
        CHECK(failure && failure->what == model.path() + " at byte " + std::to_string(touch.offset) + touch.what +
                                              ": the file ends early; load the model again when the file is whole");
        model.restore();
        model.store->clear_failure();
        CHECK(model.store->failure().has_value());
        CHECK(!model.layer(0, {1}));
    }
}

// The file is whole as far as anybody can tell, and a page of it still could not be had.
void test_a_page_that_cannot_be_read() {
    Mapped model(reading("willneed"));
    model.cut(2'000'000);
    CHECK_EQ(static_cast<volatile char*>(model.base)[2'070'005], 0);
    model.restore();
    const auto failure = model.store->failure();
    CHECK(failure && failure->error == EIO);
    CHECK(failure && failure->what.find(" at byte 2070005 (2.up, expert 9): the page cannot be read; ") !=
                         std::string::npos);
}

void test_a_worker_lives_on_in_a_shrunk_file(const std::string& reader) {
    Mapped model(reading(reader));
    CHECK(model.layer(2, {1, 2}));
    model.cut(2'000'000);
    CHECK(!model.layer(2, {1, 7}));
    CHECK(model.store->failure() && model.store->failure()->error == ENODATA);
}

void test_wishes_are_accounted() {
    StoreOptions options = reading("pread");
    options.speculative = true;
    Mapped model(options);
    CHECK(model.layer(0, {1}, 0, {16 + 3, 16 + 9}));
    CHECK(model.layer(1, {3, 4}, 0, {32 + 1}));
    CHECK(model.layer(0, {2}, 1));  // bank 2 was wished for and not routed
    const auto counters = model.store->counters();
    CHECK_EQ(counters.speculative_issued, 3u);
    CHECK_EQ(counters.speculative_used, 1u);
    CHECK_EQ(counters.speculative_wasted_bytes, 2u * (30'000 + 20'480));
    CHECK_EQ(counters.bytes, (4u + 3u) * (30'000 + 20'480));
    std::vector<uint32_t> all;
    for (uint32_t id = 0; id < 16; ++id) all.push_back(16 + id);
    CHECK(model.layer(0, {1}, 2, all));  // a whole layer would hold up this one's matmuls
    CHECK_EQ(model.store->counters().speculative_issued, 3u);
    options.speculative = false;
    Mapped without(options);
    CHECK(without.layer(0, {1}, 0, {16 + 3}));
    CHECK_EQ(without.store->counters().speculative_issued, 0u);
}

// What is read early past the page cache is what the matmul of the next layer reads, and is not read again.
void test_tiered_early() {
    StoreOptions options = reading("tiered");
    options.speculative = true;
    if (!can(options)) return;
    Mapped model(options);
    CHECK(model.layer(0, {1}, 0, {16 + 3}));
    CHECK(model.layer(1, {3}, 0, {0}));
    model.store->end_step();
    CHECK(model.layer(0, {0}, 1));
    CHECK_EQ(model.store->engagement().at("reads past the page cache"), 6u);
    CHECK_EQ(model.store->engagement().at("reads through the page cache"), 0u);
    CHECK(model.layer(1, {3}, 1));
    CHECK_EQ(model.store->engagement().at("reads through the page cache"), 2u);
}

// Flags of the mapping that holds an address, as smaps names them.
std::string flags_at(const char* address) {
    std::FILE* smaps = std::fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false;
    std::string flags;
    while (std::fgets(line, sizeof line, smaps) != nullptr) {
        unsigned long begin = 0, end = 0;
        const auto at = reinterpret_cast<unsigned long>(address);
        if (std::sscanf(line, "%lx-%lx ", &begin, &end) == 2) inside = at >= begin && at < end;
        if (inside && std::string(line).rfind("VmFlags:", 0) == 0) flags = line;
    }
    std::fclose(smaps);
    return flags;
}

void test_advice() {
    for (const auto& [advice, flag] : std::map<std::string, std::string>{{"random", " rr "}, {"sequential", " sr "}}) {
        for (const char* reader : {"willneed", "tiered"}) {
            for (const char* dense : {"mapped", "mlock", "anon"}) {
                StoreOptions options = reading(reader, "none", dense);
                options.advice = advice;
                if (!can(options)) continue;
                Mapped model(options);
                for (uint64_t token = 0; token < 2; ++token) {
                    CHECK(model.layer(0, {2}, token));
                    model.store->end_step();
                }
                for (const uint64_t offset : {80'000u, 600'000u, 2'500'000u}) {
                    CHECK(flags_at(model.base + offset).find(flag) != std::string::npos);
                }
                CHECK(flags_at(model.base + 1'750'000).find(flag) == std::string::npos);  // dense bytes
                CHECK_EQ(model.store->engagement().at("bytes of the mapping advised"), 48u * (30'000 + 20'480));
            }
        }
    }
    Mapped normal(reading("willneed"));
    CHECK(flags_at(normal.base + 80'000).find(" rr ") == std::string::npos);
}

void test_refusals() {
    CHECK_THROWS(usage, Mapped(reading("pread", "lru")));
    CHECK_THROWS(usage, Mapped(reading("uring:8")));
    StoreOptions huge = reading("willneed");
    huge.huge = true;
    CHECK_THROWS(refused, Mapped(huge));
}

}  // namespace

int main() {
    for (const char* reader :
         {"fault", "willneed", "readahead", "fadvise", "pread", "pread:2x4", "pread+willneed:2x2", "memcpy:2x3",
          "hybrid:mincore", "hybrid:cachestat", "tiered", "willneed+background:1", "memcpy+background:2",
          "pread:2x2+background:2"}) {
        test_random_routes(reading(reader));
        for (const char* dense : {"anon", "mlock"}) test_random_routes(reading(reader, "dontneed:3", dense));
        const std::string text(reader);
        if (text.find("memcpy+background") == 0) {
            test_a_worker_lives_on_in_a_shrunk_file(reader);
        } else if (text != "fault") {
            test_a_shrunk_file_is_a_failure(reader);
        }
        if (text.find("background") != std::string::npos) continue;
        for (const char* dense : {"mapped", "anon", "mlock"}) test_nothing_routed_stays(reader, dense);
    }
    for (const char* dense : {"mapped", "anon", "mlock"}) {
        for (const char* reader : {"pread", "memcpy:2", "hybrid:mincore"}) {
            test_what_is_not_hot_is_dropped(reader, dense);
        }
    }
    for (const char* reader : {"fault", "willneed", "pread", "tiered"}) {
        test_a_page_that_is_lost_is_a_failure_for_good(reader);
    }
    test_a_page_that_cannot_be_read();
    test_wishes_are_accounted();
    test_tiered_early();
    test_advice();
    test_refusals();
    return checks_failed();
}
