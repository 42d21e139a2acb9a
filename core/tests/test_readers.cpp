// What every reader promises: the file's own bytes, each tag once, demand first, counters that add up.
#include <dirent.h>
#include <poll.h>
#include <time.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "moestream/reader.h"
#include "reader_fixture.h"
#include "readers/pread.h"

using namespace moestream;
using namespace moestream::test;

namespace {

constexpr uint32_t kBlock = 4096;

std::vector<std::string> members() {
    std::vector<std::string> names = {"sync", "threads:1", "threads", "threads:64"};
    if (have_uring()) names.insert(names.end(), {"uring:1", "uring:3", "uring", "uring:1024"});
    return names;
}

// Random reads of both urgencies, reaped, promoted and dropped at random: nothing is lost, doubled or mixed up.
void random_reads(const std::string& name, const PatternFile& file, uint32_t count, uint64_t split, bool direct) {
    std::mt19937 random(count + static_cast<uint32_t>(split));
    constexpr uint32_t kMost = 12 * kBlock;
    const auto memory = aligned_memory(size_t{count} * kMost);
    const auto reader = make_reader(name, {count, split});
    std::map<uint32_t, Read> out;
    uint64_t reads = 0;
    uint64_t bytes = 0;
    Completion done[5];
    const auto reap = [&](bool wait) {
        const size_t got = reader->reap({done, 1 + random() % 5}, wait);
        CHECK(got > 0 || !wait || out.empty());
        for (size_t i = 0; i < got; ++i) {
            const auto it = out.find(done[i].tag);
            CHECK(it != out.end());
            if (it == out.end()) continue;
            const Read& read = it->second;
            CHECK_EQ(done[i].error, 0);
            CHECK(done[i].ready_ns > 0);
            CHECK(is_pattern(static_cast<const uint8_t*>(read.dst), read.offset, read.bytes));
            ++reads;
            bytes += read.bytes;
            out.erase(it);
        }
        CHECK_EQ(reader->in_flight(), out.size());
    };
    for (uint32_t tag = 0; tag < count; ++tag) {
        Read read{direct ? file.direct() : file.buffered(), tag, 0, memory.get() + size_t{tag} * kMost, 0};
        const uint32_t unit = direct ? kBlock : 1;
        read.bytes = (1 + static_cast<uint32_t>(random()) % (kMost / unit)) * unit;
        read.offset = random() % ((file.bytes() - read.bytes) / unit) * unit;
        out[tag] = read;
        reader->submit(read, random() % 3 == 0 ? Urgency::speculative : Urgency::demand);
        if (random() % 4 == 0) reap(random() % 2 == 0);
        if (random() % 5 == 0) reader->promote(static_cast<uint32_t>(random()) % (tag + 1));
        if (random() % 40 == 0) {
            reader->drop_speculative([&](const Read& gone) {
                CHECK_EQ(out.count(gone.tag), size_t{1});
                out.erase(gone.tag);
            });
        }
    }
    while (!out.empty() && failures() == 0) reap(true);
    CHECK_EQ(reader->reap(done, true), size_t{0});  // nothing in flight: at once
    CHECK_EQ(reader->counters().reads, reads);
    CHECK_EQ(reader->counters().bytes, bytes);
    CHECK_EQ(reader->counters().retries, uint64_t{0});
}

void every_depth(const PatternFile& file) {
    for (uint32_t depth = 1; depth <= 64; ++depth) {
        random_reads("threads:" + std::to_string(depth), file, 100, 0, true);
        if (have_uring()) random_reads("uring:" + std::to_string(depth), file, 100, 0, true);
    }
}

void submit_n(Reader& reader, const PatternFile& file, uint8_t* memory, uint32_t tag, Urgency urgency) {
    reader.submit({file.direct(), tag, tag * uint64_t{kBlock}, memory + tag * size_t{kBlock}, kBlock}, urgency);
}

// Lanes, promote and drop, while `blocked` holds the only place; `release` lets it go. Tag 0 is the one that blocks.
template <class Release>
void lanes(Reader& reader, const PatternFile& file, uint8_t* memory, size_t blocked, Release release) {
    for (const uint32_t tag : {1u, 2u, 3u, 4u}) submit_n(reader, file, memory, tag, Urgency::speculative);
    submit_n(reader, file, memory, 5, Urgency::demand);
    submit_n(reader, file, memory, 6, Urgency::demand);
    CHECK_EQ(reader.in_flight(), 6 + blocked);
    reader.promote(3);
    reader.promote(6);   // a demand read already
    reader.promote(77);  // unknown
    reader.promote(1);
    std::vector<uint32_t> dropped;
    reader.drop_speculative([&](const Read& read) { dropped.push_back(read.tag); });
    CHECK(dropped == std::vector<uint32_t>{2, 4});
    submit_n(reader, file, memory, 7, Urgency::speculative);
    submit_n(reader, file, memory, 8, Urgency::demand);
    CHECK_EQ(reader.in_flight(), 6 + blocked);
    release();
    std::vector<uint32_t> expected = {5, 6, 3, 1, 8, 7};
    if (blocked != 0) expected.insert(expected.begin(), 0);
    CHECK(tags(reap_all(reader)) == expected);
    CHECK(is_filled(memory + 2 * kBlock, kBlock, 0));
    CHECK(is_pattern(memory + 7 * kBlock, 7 * uint64_t{kBlock}, kBlock));
}

void lanes_uring(const PatternFile& file) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    const auto memory = aligned_memory(9 * kBlock);
    const auto reader = make_reader("uring:1", {});
    reader->submit({ends[0], 0, 0, memory.get(), 5}, Urgency::demand);
    lanes(*reader, file, memory.get(), 1, [&] { CHECK_EQ(write(ends[1], "bytes", 5), ssize_t{5}); });
    CHECK(std::memcmp(memory.get(), "bytes", 5) == 0);
    close(ends[0]);
    close(ends[1]);
}

// A pread that waits for a byte in a pipe whenever it is asked for offset 0.
int gate[2];
ssize_t gated_pread(int fd, void* to, size_t bytes, off_t offset) {
    char byte = 0;
    if (offset == 0 && read(gate[0], &byte, 1) != 1) std::abort();
    return pread(fd, to, bytes, offset);
}

void lanes_threads(const PatternFile& file) {
    if (pipe2(gate, O_CLOEXEC) != 0) std::abort();
    const auto memory = aligned_memory(9 * kBlock);
    const auto reader = make_threads({}, 1, gated_pread);
    submit_n(*reader, file, memory.get(), 0, Urgency::demand);
    lanes(*reader, file, memory.get(), 1, [] { CHECK_EQ(write(gate[1], "x", 1), ssize_t{1}); });
    close(gate[0]);
    close(gate[1]);
}

// sync does demand at once, so what it has finished comes in the order it was asked for.
void lanes_sync(const PatternFile& file) {
    const auto memory = aligned_memory(9 * kBlock);
    const auto reader = make_reader("sync", {});
    Completion done[4];
    submit_n(*reader, file, memory.get(), 1, Urgency::speculative);
    CHECK_EQ(reader->reap(done, false), size_t{0});  // never read while something better might come
    CHECK_EQ(reader->reap(done, true), size_t{1});
    lanes(*reader, file, memory.get(), 0, [] {});
}

// A pread that goes on only when four are inside it.
std::mutex meeting;
std::condition_variable met;
int present;
ssize_t meeting_pread(int fd, void* to, size_t bytes, off_t offset) {
    {
        std::unique_lock lock(meeting);
        if (++present == 4) met.notify_all();
        met.wait(lock, [] { return present >= 4; });
    }
    return pread(fd, to, bytes, offset);
}

// All the depth is used at once: by the pieces of one read, and by reads of which the last finishes first.
void at_once(const PatternFile& file) {
    const auto memory = aligned_memory(4 * kBlock);
    const auto threads = make_threads({8, kBlock}, 4, meeting_pread);
    // More than once: the first time the threads may not have gone to sleep yet.
    for (uint32_t tag = 0; tag < 100; ++tag) {
        present = 0;
        threads->submit({file.direct(), tag, 0, memory.get(), 4 * kBlock}, Urgency::demand);
        CHECK(tags(reap_all(*threads)) == std::vector<uint32_t>{tag});
    }
    CHECK(is_pattern(memory.get(), 0, 4 * kBlock));
    if (!have_uring()) return;
    int ends[3][2];
    const auto uring = make_reader("uring:3", {});
    for (uint32_t tag = 0; tag < 3; ++tag) {
        if (pipe2(ends[tag], O_CLOEXEC) != 0) std::abort();
        uring->submit({ends[tag][0], tag, 0, memory.get() + tag, 1}, Urgency::demand);
    }
    for (uint32_t tag = 3; tag-- > 0;) {
        Completion done;
        CHECK_EQ(write(ends[tag][1], "x", 1), ssize_t{1});
        CHECK_EQ(uring->reap({&done, 1}, true), size_t{1});
        CHECK_EQ(done.tag, tag);
    }
    for (const auto& pair : ends) {
        close(pair[0]);
        close(pair[1]);
    }
}

double thread_cpu_seconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Waiting for 200 ms must be sleeping. 20 ms of processor time would already be spinning.
void waits_asleep(Reader& reader, int release) {
    std::thread later([release] {
        poll(nullptr, 0, 200);
        CHECK_EQ(write(release, "x", 1), ssize_t{1});
    });
    Completion done;
    const double before = thread_cpu_seconds();
    CHECK_EQ(reader.reap({&done, 1}, true), size_t{1});
    CHECK(thread_cpu_seconds() - before < 0.02);
    CHECK(reader.counters().wait_ns > 50'000'000);
    later.join();
}

void sleeping(const PatternFile& file) {
    if (pipe2(gate, O_CLOEXEC) != 0) std::abort();
    const auto memory = aligned_memory(kBlock);
    const auto threads = make_threads({}, 2, gated_pread);
    submit_n(*threads, file, memory.get(), 0, Urgency::demand);
    waits_asleep(*threads, gate[1]);
    if (have_uring()) {
        const auto uring = make_reader("uring:2", {});
        uring->submit({gate[0], 0, 0, memory.get(), 1}, Urgency::demand);
        waits_asleep(*uring, gate[1]);
    }
    close(gate[0]);
    close(gate[1]);
}

void full_queue(const PatternFile& file) {
    for (const auto& name : members()) {
        const auto memory = aligned_memory(5 * kBlock);
        const auto reader = make_reader(name, {4, 0});
        for (uint32_t tag = 0; tag < 4; ++tag) submit_n(*reader, file, memory.get(), tag, Urgency::demand);
        CHECK_THROWS(internal, submit_n(*reader, file, memory.get(), 4, Urgency::demand));
        CHECK_EQ(reap_all(*reader).size(), size_t{4});
    }
}

void empty_reads(const PatternFile& file) {
    for (const auto& name : members()) {
        uint8_t nothing = 0;
        const auto reader = make_reader(name, {});
        reader->submit({file.buffered(), 3, 0, &nothing, 0}, Urgency::demand);
        const auto done = reap_all(*reader);
        CHECK(done.size() == 1 && done[0].tag == 3 && done[0].error == 0);
        CHECK_EQ(reader->reap({}, true), size_t{0});
    }
}

void null_reader() {
    uint8_t untouched = 42;
    const auto reader = make_reader("null", {});
    reader->submit({-1, 1, 0, &untouched, 1}, Urgency::demand);
    reader->submit({-1, 2, 0, &untouched, 1}, Urgency::speculative);
    reader->drop_speculative([](const Read&) { CHECK(false); });  // both are done
    CHECK(tags(reap_all(*reader)) == std::vector<uint32_t>{1, 2});
    CHECK_EQ(untouched, 42);
    CHECK_EQ(reader->counters().bytes, uint64_t{2});
}

// `NxS` cuts each read in S equal parts of whole pages, fewer where it has fewer pages; it completes once, when all are
// there.
void pieces(const PatternFile& file) {
    struct Case {
        uint32_t pages, asked, got;
    };
    for (const std::string member : {"threads:3", "uring:3"}) {
        if (member[0] == 'u' && !have_uring()) continue;
        for (const Case& which : {Case{8, 8, 8}, {8, 4, 4}, {8, 1, 1}, {9, 4, 3}, {3, 8, 3}, {1, 2, 1}}) {
            const auto memory = aligned_memory(which.pages * kBlock);
            const auto reader = make_reader(member + "x" + std::to_string(which.asked), {});
            CHECK_EQ(reader->depth(), 3u);
            reader->submit({file.direct(), 5, 2 * kBlock, memory.get(), which.pages * kBlock}, Urgency::demand);
            CHECK(tags(reap_all(*reader)) == std::vector<uint32_t>{5});
            CHECK(is_pattern(memory.get(), 2 * kBlock, which.pages * kBlock));
            CHECK_EQ(reader->counters().pieces, uint64_t{which.got});
            CHECK_EQ(reader->counters().reads, uint64_t{1});
        }
    }
}

void names() {
    for (const char* text : {"uring:0", "uring:1025", "uring:", "uring:x", "uring:1x", "uring:-1", "threads:0",
                             "threads:65", "threads:2x0", "threads:2x9", "uring:2x", "uring:x2", "uring:2x2x2", "sync:x2", "sync:1x2",
                             "threads:99999999999", "sync:1", "null:1", "", "nope"}) {
        CHECK_THROWS(usage, make_reader(text, {}));
    }
    CHECK_THROWS(usage, make_reader("sync", {0, 0}));
}

// Descriptors of rings that are open; each must close on exec.
size_t open_rings() {
    size_t count = 0;
    DIR* directory = opendir("/proc/self/fd");
    if (directory == nullptr) std::abort();
    while (const dirent* entry = readdir(directory)) {
        char target[64] = {};
        if (readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1) < 0) continue;
        if (std::string(target) != "anon_inode:[io_uring]") continue;
        ++count;
        CHECK((fcntl(std::atoi(entry->d_name), F_GETFD) & FD_CLOEXEC) != 0);
    }
    closedir(directory);
    return count;
}

void descriptors() {
    if (!have_uring()) return;
    const size_t before = open_rings();
    {
        const auto reader = make_reader("uring", {});
        CHECK_EQ(open_rings(), before + 1);
    }
    CHECK_EQ(open_rings(), before);
}

}  // namespace

int main() {
    const PatternFile file(kMostFile);
    names();
    null_reader();
    for (const auto& name : members()) {
        random_reads(name, file, 600, 0, true);
        random_reads(name, file, 600, 0, false);
        random_reads(name, file, 300, 2 * kBlock, true);
        random_reads(name, file, 300, 1, false);  // pieces of a page
    }
    every_depth(file);
    if (have_uring()) lanes_uring(file);
    lanes_threads(file);
    lanes_sync(file);
    at_once(file);
    sleeping(file);
    full_queue(file);
    pieces(file);
    empty_reads(file);
    descriptors();
    return exit_code();
}
