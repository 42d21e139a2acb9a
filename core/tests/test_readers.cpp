// The readers' contract, the same for each: the right bytes at the right place, errors with the offset they happened
// at, short reads continued, demand before speculation, and an account that adds up.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "moestream/reader.h"
#include "readers/lanes.h"

using namespace moestream;

namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kPages = 256;
constexpr uint64_t kFileBytes = kPages * kPageBytes + 1000;

uint8_t byte_at(uint64_t offset) { return static_cast<uint8_t>((offset * 2654435761u) >> 13); }

// A file whose every byte follows from its offset, gone with the object.
class PatternFile {
  public:
    PatternFile() {
        char path[] = "reader-test-XXXXXX";
        fd = mkstemp(path);
        std::vector<uint8_t> bytes(kFileBytes);
        for (uint64_t i = 0; i < kFileBytes; ++i) bytes[i] = byte_at(i);
        CHECK(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        direct = open(path, O_RDONLY | O_DIRECT);
        unlink(path);
    }
    ~PatternFile() {
        close(fd);
        if (direct >= 0) close(direct);
    }
    PatternFile(const PatternFile&) = delete;
    PatternFile& operator=(const PatternFile&) = delete;
    int fd = -1;
    int direct = -1;  // -1: refused here
};

class Memory {
  public:
    explicit Memory(size_t bytes)
        : bytes_(bytes), base_(static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
    ~Memory() { munmap(base_, bytes_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint8_t* at(size_t offset) const { return base_ + offset; }

  private:
    size_t bytes_;
    uint8_t* base_;
};

bool holds(const uint8_t* memory, uint64_t offset, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; ++i) {
        if (memory[i] != byte_at(offset + i)) return false;
    }
    return true;
}

std::vector<Completion> drain(Reader& reader) {
    std::vector<Completion> all;
    std::array<Completion, 7> some;
    while (reader.in_flight() > 0) {
        const size_t count = reader.reap(some, true);
        CHECK(count > 0);
        all.insert(all.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(count));
        if (count == 0) break;
    }
    CHECK_EQ(reader.reap(some, true), 0u);  // nothing in flight: returns at once
    return all;
}

void test_random_reads(const char* name, int fd) {
    std::mt19937 random(7);
    const auto reader = make_reader(name, {512});
    const Memory memory(kPages * kPageBytes);
    uint64_t bytes = 0;
    std::vector<Read> reads;
    for (uint32_t tag = 0; tag < 300; ++tag) {
        const uint64_t page = random() % (kPages - 8);
        const auto length = static_cast<uint32_t>((1 + random() % 8) * kPageBytes);
        reads.push_back({fd, tag, page * kPageBytes, memory.at(page * kPageBytes), length});
        reader->submit(reads.back(), tag % 3 == 0 ? Urgency::speculative : Urgency::demand);
        if (tag % 5 == 0) reader->promote(tag / 2);
        bytes += length;
    }
    CHECK_EQ(reader->in_flight(), 300u);
    std::set<uint32_t> tags;
    for (const auto& completion : drain(*reader)) {
        CHECK_EQ(completion.error, 0);
        CHECK(completion.ready_ns > 0);
        CHECK(tags.insert(completion.tag).second);
    }
    CHECK_EQ(tags.size(), 300u);
    for (const auto& read : reads) CHECK(holds(static_cast<uint8_t*>(read.dst), read.offset, read.bytes));
    CHECK_EQ(reader->counters().reads, 300u);
    CHECK_EQ(reader->counters().bytes, bytes);
}

// The file's last bytes end inside a page and inside a read: what is there arrives, then the end is named.
void test_end_of_file(const char* name, const PatternFile& file) {
    const Memory memory(16 * kPageBytes);
    for (const int fd : {file.fd, file.direct}) {
        if (fd < 0) continue;
        const auto reader = make_reader(name, {8});
        const uint64_t offset = (kPages - 1) * kPageBytes;
        reader->submit({fd, 1, offset, memory.at(0), 4 * kPageBytes}, Urgency::demand);
        auto done = drain(*reader);
        CHECK_EQ(done.size(), 1u);
        CHECK_EQ(done[0].error, ENODATA);
        CHECK_EQ(done[0].fail_offset, kFileBytes);
        CHECK(holds(memory.at(0), offset, kFileBytes - offset));
        reader->submit({fd, 2, (kPages + 4) * kPageBytes, memory.at(0), kPageBytes}, Urgency::demand);
        done = drain(*reader);
        CHECK_EQ(done[0].error, ENODATA);
        CHECK_EQ(reader->counters().reads, 0u);
        CHECK_EQ(reader->counters().bytes, 0u);
    }
}

void test_errors(const char* name, const PatternFile& file) {
    const Memory memory(kPageBytes);
    const auto reader = make_reader(name, {8});
    reader->submit({-1, 5, 3 * kPageBytes, memory.at(0), kPageBytes}, Urgency::demand);
    auto done = drain(*reader);
    CHECK_EQ(done.size(), 1u);
    CHECK_EQ(done[0].tag, 5u);
    CHECK_EQ(done[0].error, EBADF);
    CHECK_EQ(done[0].fail_offset, 3 * kPageBytes);
    // A destination that is not memory is an error of that read; the next one works.
    reader->submit({file.fd, 6, 0, nullptr, kPageBytes}, Urgency::demand);
    CHECK_EQ(drain(*reader)[0].error, EFAULT);
    reader->submit({file.fd, 7, 0, memory.at(0), kPageBytes}, Urgency::demand);
    CHECK_EQ(drain(*reader)[0].error, 0);
    CHECK(holds(memory.at(0), 0, kPageBytes));
}

// Every speculative read is either reaped or dropped, never both, never neither; a promoted one is not dropped.
void test_speculation(const char* name, const PatternFile& file) {
    const Memory memory(200 * kPageBytes);
    const auto reader = make_reader(name, {256});
    for (uint32_t tag = 0; tag < 200; ++tag) {
        reader->submit({file.fd, tag, tag * kPageBytes, memory.at(tag * kPageBytes), kPageBytes}, Urgency::speculative);
    }
    for (uint32_t tag = 150; tag < 160; ++tag) reader->promote(tag);
    reader->promote(9999);  // never submitted: no effect
    std::set<uint32_t> dropped;
    reader->drop_speculative([&](const Read& read) { CHECK(dropped.insert(read.tag).second); });
    for (uint32_t tag = 150; tag < 160; ++tag) CHECK(!dropped.contains(tag));
    std::set<uint32_t> reaped;
    for (const auto& completion : drain(*reader)) {
        CHECK_EQ(completion.error, 0);
        CHECK(!dropped.contains(completion.tag));
        CHECK(reaped.insert(completion.tag).second);
        CHECK(holds(memory.at(completion.tag * kPageBytes), completion.tag * kPageBytes, kPageBytes));
    }
    CHECK_EQ(reaped.size() + dropped.size(), 200u);
    CHECK_EQ(reader->counters().bytes, reaped.size() * kPageBytes);
}

// Destroyed with reads queued and started: it returns, and nothing writes into memory that is given back after.
void test_destruction(const char* name, const PatternFile& file) {
    for (int round = 0; round < 20; ++round) {
        const Memory memory(64 * kPageBytes);
        const auto reader = make_reader(name, {64});
        for (uint32_t tag = 0; tag < 64; ++tag) {
            reader->submit({file.direct >= 0 ? file.direct : file.fd, tag, tag * kPageBytes,
                            memory.at(tag * kPageBytes), kPageBytes},
                           tag % 2 == 0 ? Urgency::demand : Urgency::speculative);
        }
    }
}

// Signals interrupt system calls; reads and their bytes do not care.
void test_signals(const char* name, const PatternFile& file) {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    sigaction(SIGALRM, &action, nullptr);  // without SA_RESTART: system calls return EINTR
    itimerval every{{0, 200}, {0, 200}};
    setitimer(ITIMER_REAL, &every, nullptr);
    for (int round = 0; round < 5; ++round) test_random_reads(name, file.fd);
    every = {};
    setitimer(ITIMER_REAL, &every, nullptr);
}

void test_short_reads() {
    ReaderCounters counters;
    Completion completion;
    Progress progress{Read{0, 9, 8192, nullptr, 12288}};
    CHECK(advance(progress, 5000, counters, completion) == Next::again);
    CHECK_EQ(progress.from(), 4096u);  // a direct read goes on from a whole page
    CHECK_EQ(progress.offset(), 12288u);
    CHECK_EQ(progress.bytes(), 8192u);
    CHECK(advance(progress, -EINTR, counters, completion) == Next::again);
    CHECK(advance(progress, 4096, counters, completion) == Next::again);
    CHECK(advance(progress, 4096, counters, completion) == Next::finished);
    CHECK_EQ(completion.error, 0);
    CHECK_EQ(counters.bytes, 12288u);
    CHECK_EQ(counters.retries, 3u);

    Progress ends{Read{0, 9, 8192, nullptr, 12288}};
    CHECK(advance(ends, 5000, counters, completion) == Next::again);
    CHECK(advance(ends, 904, counters, completion) == Next::finished);  // the same end again: nothing new
    CHECK_EQ(completion.error, ENODATA);
    CHECK_EQ(completion.fail_offset, 8192u + 5000u);

    Progress flaky{Read{0, 9, 8192, nullptr, 4096}};
    CHECK(advance(flaky, -EIO, counters, completion) == Next::again);
    CHECK(advance(flaky, -EIO, counters, completion) == Next::finished);
    CHECK_EQ(completion.error, EIO);
    CHECK_EQ(completion.fail_offset, 8192u);
}

void test_lanes() {
    Lanes lanes(4);
    for (uint32_t tag = 0; tag < 4; ++tag) lanes.push(Read{0, tag}, Urgency::speculative);
    lanes.push(Read{0, 10}, Urgency::demand);
    CHECK_EQ(lanes.pop().tag, 10u);
    CHECK(lanes.promote(2));
    CHECK(!lanes.promote(2));
    CHECK_EQ(lanes.size(), 4u);
    std::vector<uint32_t> order;
    while (!lanes.empty()) order.push_back(lanes.pop().tag);
    CHECK(order == std::vector<uint32_t>{2, 0, 1, 3});
    for (uint32_t tag = 0; tag < 4; ++tag) lanes.push(Read{0, tag}, Urgency::demand);
    CHECK_THROWS(internal, lanes.push(Read{0, 4}, Urgency::demand));
}

void test_names() {
    CHECK_THROWS(usage, make_reader("threads:0", {}));
    CHECK_THROWS(usage, make_reader("threads:65", {}));
    CHECK_THROWS(usage, make_reader("threads:x", {}));
    CHECK_THROWS(usage, make_reader("uring:0", {}));
    CHECK_THROWS(usage, make_reader("uring:2000", {}));
    CHECK_THROWS(usage, make_reader("uring:8x", {}));
    CHECK_THROWS(usage, make_reader("urin", {}));
}

void test_null() {
    const auto reader = make_reader("null", {4});
    reader->submit({-1, 3, 0, nullptr, 8192}, Urgency::demand);
    const auto done = drain(*reader);
    CHECK_EQ(done.size(), 1u);
    CHECK_EQ(reader->counters().bytes, 8192u);
}

bool uring_works() {
    try {
        make_reader("uring", {4});
        return true;
    } catch (const Error& error) {
        std::fprintf(stderr, "io_uring is not tested: %s\n", error.what());
        return false;
    }
}

}  // namespace

int main() {
    const PatternFile file;
    std::vector<const char*> readers{"sync", "threads:1", "threads:4"};
    if (uring_works()) readers.insert(readers.end(), {"uring:1", "uring:3", "uring:24", "uring:1024"});
    for (const char* name : readers) {
        test_random_reads(name, file.fd);
        if (file.direct >= 0) test_random_reads(name, file.direct);
        test_end_of_file(name, file);
        test_errors(name, file);
        test_speculation(name, file);
        test_destruction(name, file);
        test_signals(name, file);
    }
    test_short_reads();
    test_lanes();
    test_names();
    test_null();
    return test::checks_failed();
}
