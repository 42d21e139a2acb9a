// The warmers against a small file whose pages are dropped first: what each asks for comes into the page cache and
// nothing else of the model does, what is counted is what was done, and trouble names the slab it happened to.
#include <sys/mman.h>
#include <sys/wait.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "reader_fixture.h"
#include "stores/warmer.h"
#include "warmers/scratch.h"

using namespace moestream;
using namespace moestream::test;

namespace {

constexpr uint64_t kFile = 2 << 20;
constexpr uint64_t kSlab = 100'000;  // neither begins nor ends with a page

class MappedFile {
  public:
    MappedFile() : file_(kFile) {
        base_ = static_cast<char*>(mmap(nullptr, kFile, PROT_READ, MAP_SHARED, file_.buffered(), 0));
        if (base_ == MAP_FAILED) std::abort();
        madvise(base_, kFile, MADV_RANDOM);  // no read-ahead of the kernel's own: what comes was asked for
        posix_fadvise(file_.buffered(), 0, 0, POSIX_FADV_RANDOM);
        cold();
    }
    ~MappedFile() { munmap(base_, kFile); }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::string path() const { return "/proc/self/fd/" + std::to_string(file_.buffered()); }
    // Pages that were never written back cannot be dropped.
    void cold() const {
        const int fd = open(path().c_str(), O_RDWR | O_CLOEXEC);
        CHECK_EQ(fsync(fd), 0);
        close(fd);
        CHECK_EQ(madvise(base_, kFile, MADV_DONTNEED), 0);
        CHECK_EQ(posix_fadvise(file_.buffered(), 0, 0, POSIX_FADV_DONTNEED), 0);
        CHECK_EQ(resident(0, kFile), 0u);
    }
    void cut(uint64_t bytes) const {
        const int fd = open(path().c_str(), O_RDWR | O_CLOEXEC);
        CHECK_EQ(ftruncate(fd, static_cast<off_t>(bytes)), 0);
        close(fd);
    }
    // Pages in memory of those that [begin, end) touches.
    uint64_t resident(uint64_t begin, uint64_t end) const {
        const uint64_t first = begin / kPage * kPage;
        std::vector<unsigned char> pages((end - first + kPage - 1) / kPage);
        CHECK_EQ(mincore(base_ + first, end - first, pages.data()), 0);
        return static_cast<uint64_t>(std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; }));
    }
    MappedSlab slab(uint32_t number) const {
        const uint64_t offset = number * kSlab + 500;
        return {base_ + offset, file_.buffered(), file_.direct(), offset, kSlab, number};
    }
    std::vector<MappedSlab> slabs(const std::vector<uint32_t>& numbers) const {
        std::vector<MappedSlab> all;
        for (const uint32_t number : numbers) all.push_back(slab(number));
        return all;
    }
    uint64_t pages(const MappedSlab& slab) const {
        return (slab.offset + slab.bytes + kPage - 1) / kPage - slab.offset / kPage;
    }
    bool there(const MappedSlab& slab) const { return resident(slab.offset, slab.offset + slab.bytes) == pages(slab); }
    bool right(const MappedSlab& slab) const {
        return is_pattern(reinterpret_cast<uint8_t*>(slab.address), slab.offset, slab.bytes);
    }
    const PatternFile& file() const { return file_; }

  private:
    PatternFile file_;
    char* base_ = nullptr;
};

WarmerOptions options() { return {kPage, false, 0, 64, [](const std::string&) {}}; }

// False, once said, where this kernel or file cannot do it.
std::unique_ptr<Warmer> opened(const std::string& text, const MappedFile& file) {
    try {
        auto warmer = make_warmer(text, options());
        const bool direct = file.file().direct() != file.file().buffered();
        warmer->open(file.path(), file.file().buffered(), direct ? file.file().direct() : -1);
        return warmer;
    } catch (const Error& error) {
        if (error.kind != ErrorKind::unsupported) throw;
        std::fprintf(stderr, "skipping %s: %s\n", text.c_str(), error.what());
        return nullptr;
    }
}

template <class Condition>
bool within_seconds(int seconds, Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > deadline) return false;
        std::this_thread::yield();
    }
    return true;
}

void test_what_is_asked_for_comes(const std::string& text) {
    const MappedFile file;
    const auto warmer = opened(text, file);
    if (warmer == nullptr) return;
    auto slabs = file.slabs({2, 4, 9});
    CHECK_EQ(warmer->warm(slabs).error, 0);
    const auto all_there = [&] {
        return std::all_of(slabs.begin(), slabs.end(), [&](const auto& slab) { return file.there(slab); });
    };
    // A call that does not wait for the bytes: they are on their way.
    CHECK(warmer->asynchronous() ? within_seconds(20, all_there) : all_there());
    for (const auto& slab : slabs) {
        CHECK_EQ(slab.asked, kSlab);
        CHECK(file.right(slab));
    }
    // memcpy's faults map what lies beside, but read only what they need.
    CHECK_EQ(file.resident(0, kFile), file.pages(slabs[0]) + file.pages(slabs[1]) + file.pages(slabs[2]));
    uint64_t done = 0;
    for (const auto& [name, count] : warmer->counts()) done += count;
    CHECK(done > 0);
}

void test_pieces_are_counted() {
    const MappedFile file;
    for (const auto& [text, name, expected] : std::vector<std::tuple<std::string, std::string, uint64_t>>{
             {"pread", "preads", 2}, {"pread:3x4", "preads", 8}, {"memcpy:2x8", "copies", 14}}) {
        const auto warmer = make_warmer(text, options());
        auto slabs = file.slabs({0, 1});
        CHECK_EQ(warmer->warm(slabs).error, 0);
        CHECK_EQ(warmer->counts().at(name), expected);  // eight pieces of 100,000 bytes are seven of 16 KiB
    }
}

void test_only_what_is_absent_is_read(const std::string& text) {
    const MappedFile file;
    const auto warmer = opened(text, file);
    if (warmer == nullptr) return;
    auto slabs = file.slabs({4});
    // The first sixteen pages are there, and so are two in the middle of what is left.
    std::vector<char> sink(16 * kPage);
    const uint64_t first = slabs[0].offset / kPage * kPage;
    CHECK_EQ(pread(file.file().buffered(), sink.data(), 16 * kPage, static_cast<off_t>(first)), 16 * ssize_t{kPage});
    CHECK_EQ(file.resident(first, first + 16 * kPage), 16u);
    CHECK_EQ(warmer->warm(slabs).error, 0);
    CHECK(file.there(slabs[0]));
    const uint64_t absent = slabs[0].offset + kSlab - (first + 16 * kPage);
    const uint64_t read = warmer->counts().at("bytes read");
    CHECK(text == "hybrid:mincore" ? read == absent : read >= absent && read < absent + 8 * kPage);
    CHECK_EQ(slabs[0].asked, read);
    CHECK_EQ(warmer->counts().at("bytes found resident"), kSlab - read);
    CHECK_EQ(warmer->warm(slabs).error, 0);
    CHECK_EQ(warmer->counts().at("bytes read"), read);  // all of it is there now
    CHECK_EQ(slabs[0].asked, 0u);
}

void test_tiered() {
    const MappedFile file;
    const auto warmer = opened("tiered", file);
    if (warmer == nullptr) return;
    auto slabs = file.slabs({1, 7});
    CHECK_EQ(warmer->warm(slabs).error, 0);
    CHECK_EQ(warmer->counts().at("reads past the page cache"), 2u);
    for (const auto& slab : slabs) CHECK(file.right(slab));
    // Matmuls have seen the right bytes. Of the file itself no more is in memory than the pages shared with neighbours.
    CHECK_EQ(warmer->done({slabs.data(), 1}), 0);
    const uint64_t begin = slabs[0].offset, end = begin + kSlab;
    CHECK(file.resident(begin, end) <= 2);
    CHECK(file.right(slabs[1]));  // the other one's cover stays until it is said to be over
    CHECK_EQ(warmer->warm({&slabs[1], 1}).error, 0);
    CHECK_EQ(warmer->counts().at("reads past the page cache"), 2u);
    CHECK_EQ(warmer->counts().at("reads through the page cache"), 0u);
    CHECK_EQ(warmer->done(slabs), 0);
    CHECK_EQ(warmer->warm(slabs).error, 0);
    CHECK_EQ(warmer->counts().at("reads through the page cache"), 2u);
    for (const auto& slab : slabs) CHECK(file.there(slab) && file.right(slab));
}

// Trouble comes out of the call, or of one after it where workers do the reading; then it is forgotten.
void test_trouble_names_its_slab(const std::string& text) {
    const MappedFile file;
    const auto warmer = opened(text, file);
    if (warmer == nullptr) return;
    file.cut(6 * kSlab);
    auto slabs = file.slabs({1, 8});
    auto fine = file.slabs({0});
    Warmer::Trouble trouble = warmer->warm(slabs);
    CHECK(within_seconds(20, [&] {
        if (trouble.error == 0) trouble = warmer->warm(fine);
        return trouble.error != 0;
    }));
    CHECK_EQ(trouble.error, ENODATA);
    CHECK_EQ(trouble.slab.number, 8u);
    CHECK_EQ(trouble.slab.offset, 8 * kSlab + 500);
    warmer->settle();
    CHECK_EQ(warmer->done(slabs), 0);
    CHECK_EQ(warmer->warm(fine).error, 0);
}

// A member of the test's own that stays where it is until it is let go.
struct Gate {
    std::mutex mutex;
    std::condition_variable moved;
    bool open = false;
    int entered = 0;
    std::vector<uint32_t> passed;
};
Gate gate;

struct Stuck : Warmer {
    Trouble warm(std::span<MappedSlab> slabs) override {
        std::unique_lock lock(gate.mutex);
        ++gate.entered;
        gate.moved.notify_all();
        gate.moved.wait(lock, [] { return gate.open; });
        gate.passed.push_back(slabs[0].number);
        return {slabs[0].number == 13 ? EIO : 0, slabs[0]};
    }
    std::map<std::string, uint64_t> counts() const override { return {{"passed", gate.passed.size()}}; }
};
const WarmerRegistration stuck("stuck", "waits until it is let go",
                               [](const WarmerOptions&, const std::string&) { return std::make_unique<Stuck>(); });

void close_gate() {
    gate.open = false;
    gate.entered = 0;
    gate.passed.clear();
}
void let_go() {
    const std::lock_guard lock(gate.mutex);
    gate.open = true;
    gate.moved.notify_all();
}
void wait_entered(int workers) {
    std::unique_lock lock(gate.mutex);
    gate.moved.wait(lock, [&] { return gate.entered == workers; });
}

void test_the_background_is_not_waited_for() {
    const MappedFile file;
    close_gate();
    const auto warmer = make_warmer("stuck+background:2", options());
    CHECK(warmer->asynchronous());
    auto two = file.slabs({0, 1});
    CHECK_EQ(warmer->warm(two).error, 0);
    wait_entered(2);
    // Both workers are busy: a full queue gives up what has waited longest.
    for (uint32_t i = 0; i < 5000; ++i) {
        auto one = file.slabs({2 + i % 10});
        CHECK_EQ(warmer->warm(one).error, 0);
    }
    CHECK_EQ(warmer->counts().at("slabs left out of a full queue"), 5000u - 4096u);
    auto last = file.slabs({13});
    CHECK_EQ(warmer->warm(last).error, 0);
    let_go();
    CHECK(within_seconds(20, [&] {
        const std::lock_guard lock(gate.mutex);
        return gate.passed.size() == 2 + 4096;
    }));
    CHECK_EQ(std::count(gate.passed.begin(), gate.passed.end(), 13u), 1);
    warmer->settle();  // and with it the failure of 13 is forgotten
    CHECK_EQ(warmer->warm(two).error, 0);
}

// Asleep in a system call, as a thread that joins another one is.
bool sleeps(pid_t thread) {
    std::FILE* stat = std::fopen(("/proc/self/task/" + std::to_string(thread) + "/stat").c_str(), "r");
    char state = '?';
    if (stat == nullptr || std::fscanf(stat, "%*d (%*[^)]) %c", &state) != 1) state = '?';
    if (stat != nullptr) std::fclose(stat);
    return state == 'S';
}

void test_what_has_not_begun_is_dropped_at_the_end() {
    const MappedFile file;
    close_gate();
    auto warmer = make_warmer("stuck+background:2", options());
    auto slabs = file.slabs({0, 1, 2, 3, 4, 5, 6, 7});
    CHECK_EQ(warmer->warm(slabs).error, 0);
    wait_entered(2);
    std::atomic<pid_t> id{0};
    std::thread ender([&] {
        id = gettid();
        warmer.reset();
    });
    CHECK(within_seconds(20, [&] { return id != 0 && sleeps(id); }));
    let_go();
    ender.join();
    CHECK_EQ(gate.passed.size(), 2u);
}

// A child of fork has none of the threads; ending what it inherited must not wait for them.
void test_a_forked_child_may_end_it(const std::string& text) {
    const MappedFile file;
    auto warmer = make_warmer(text, options());
    auto slabs = file.slabs({0, 1});
    CHECK_EQ(warmer->warm(slabs).error, 0);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        warmer.reset();
        _exit(0);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(warmer->warm(slabs).error, 0);
}

void test_scratch() {
    for (const uint64_t alignment : {uint64_t{4} << 10, uint64_t{16} << 10, uint64_t{2} << 20}) {
        WarmerOptions wanted = options();
        wanted.alignment = alignment;
        const Scratch scratch(wanted);
        const auto address = reinterpret_cast<uintptr_t>(scratch.data());
        CHECK_EQ(address % alignment, 0u);
        CHECK(alignment == Scratch::kBytes || address % (2 * alignment) != 0);
        CHECK_EQ(scratch.huge_bytes(), 0u);
    }
    std::vector<std::string> said;
    WarmerOptions wanted = options();
    wanted.huge = true;
    wanted.fallback = [&](const std::string& line) { said.push_back(line); };
    const Scratch scratch(wanted);
    CHECK((scratch.huge_bytes() == Scratch::kBytes) == said.empty());
}

void test_refusals() {
    WarmerOptions huge = options();
    huge.huge = true;
    WarmerOptions aligned = options();
    aligned.alignment = 16 << 10;
    for (const char* text : {"fault", "willneed", "readahead", "fadvise", "willneed+background:2"}) {
        CHECK_THROWS(refused, make_warmer(text, huge));
        CHECK_THROWS(refused, make_warmer(text, aligned));
    }
    CHECK_THROWS(refused, make_warmer("tiered+background:1", options()));
    for (const char* text : {"pread:0", "pread:65", "pread:2x9", "pread:2x", "pread:x2", "memcpy:a", "hybrid:guess",
                             "willneed:2", "readahead:1", "fadvise:1", "fault:1", "tiered:2", "wilneed",
                             "pread+background:0", "pread+background:17", "pread+background:"}) {
        CHECK_THROWS(usage, make_warmer(text, options()));
    }
    const MappedFile file;
    CHECK_THROWS(unsupported, make_warmer("tiered", options())->open(file.path(), file.file().buffered(), -1));
    CHECK_THROWS(unsupported, make_warmer("hybrid:cachestat", options())->open(file.path(), -1, -1));
}

}  // namespace

int main() {
    for (const char* text :
         {"willneed", "readahead", "fadvise", "pread", "pread:3x4", "pread+willneed", "pread+willneed:2x2", "memcpy",
          "memcpy:2x3", "hybrid", "hybrid:mincore", "hybrid:cachestat", "willneed+background:2",
          "pread:2x2+background:3", "memcpy+background:1", "hybrid:cachestat+background:2"}) {
        test_what_is_asked_for_comes(text);
    }
    test_pieces_are_counted();
    for (const char* text : {"hybrid:mincore", "hybrid:cachestat"}) test_only_what_is_absent_is_read(text);
    test_tiered();
    for (const char* text : {"pread", "pread:2x4", "pread+willneed:2x2", "hybrid:mincore", "hybrid:cachestat", "tiered",
                             "pread+background:2", "pread:2x2+background:2"}) {
        test_trouble_names_its_slab(text);
    }
    test_the_background_is_not_waited_for();
    test_what_has_not_begun_is_dropped_at_the_end();
    for (const char* text : {"pread:3x2", "pread+background:2", "memcpy:2+background:2"}) {
        test_a_forked_child_may_end_it(text);
    }
    test_scratch();
    test_refusals();
    return checks_failed();
}
