// What readers do when a read, the kernel or the process goes wrong.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <thread>
#include <tuple>

#include "moestream/reader.h"
#include "reader_fixture.h"
#include "readers/pread.h"
#include "readers/uring.h"

using namespace moestream;
using namespace moestream::test;

namespace {

constexpr uint32_t kBlock = 4096;
constexpr uint32_t kBytes = 16 * kBlock;

std::vector<std::string> members() {
    std::vector<std::string> names = {"sync", "threads:1", "threads:4"};
    if (have_uring()) names.insert(names.end(), {"uring:1", "uring:24"});
    return names;
}

Completion read_one(Reader& reader, const Read& read) {
    reader.submit(read, Urgency::demand);
    const auto done = reap_all(reader);
    CHECK_EQ(done.size(), size_t{1});
    return done.empty() ? Completion{} : done[0];
}

// Preads that fail on purpose. They count the calls and note an offset that a direct read could not have.
std::atomic<int> calls;
std::atomic<bool> misaligned;

ssize_t note(int fd, void* to, size_t bytes, off_t offset) {
    if (offset % kBlock != 0 || reinterpret_cast<uintptr_t>(to) % kBlock != 0) misaligned = true;
    return pread(fd, to, bytes, offset);
}
ssize_t short_pread(int fd, void* to, size_t bytes, off_t offset) {
    ++calls;
    const ssize_t got = note(fd, to, bytes, offset);
    return std::min<ssize_t>(got, 5000);
}
ssize_t interrupted_pread(int fd, void* to, size_t bytes, off_t offset) {
    const int call = calls++;
    if (call % 3 == 2) return note(fd, to, bytes, offset);
    errno = call % 3 == 0 ? EINTR : EAGAIN;
    return -1;
}
ssize_t again_pread(int, void*, size_t, off_t) {
    ++calls;
    errno = EAGAIN;
    return -1;
}
ssize_t eio_once_pread(int fd, void* to, size_t bytes, off_t offset) {
    if (calls++ > 0) return note(fd, to, bytes, offset);
    errno = EIO;
    return -1;
}
constexpr off_t kBadByte = 5 * kBlock;
ssize_t bad_block_pread(int fd, void* to, size_t bytes, off_t offset) {
    ++calls;
    if (offset <= kBadByte && kBadByte < offset + static_cast<off_t>(bytes)) {
        if (offset < kBadByte) return note(fd, to, static_cast<size_t>(kBadByte - offset), offset);
        errno = EIO;
        return -1;
    }
    return note(fd, to, bytes, offset);
}
ssize_t bad_end_pread(int fd, void* to, size_t bytes, off_t offset) {
    ++calls;
    if (offset < kBadByte) return note(fd, to, std::min(bytes, static_cast<size_t>(kBadByte - offset)), offset);
    errno = EIO;
    return -1;
}

// A ring whose completions are the results of a pread, the last started first.
class PreadRing {
  public:
    explicit PreadRing(uint32_t) {}
    void push_read(int fd, uint64_t offset, void* to, uint32_t bytes, uint64_t number) {
        const ssize_t got = pread_(fd, to, bytes, static_cast<off_t>(offset));
        back_.emplace_back(number, got < 0 ? -errno : static_cast<int32_t>(got));
    }
    void submit() {}
    void submit_wait() {
        if (back_.empty()) std::abort();  // a real one would sleep for ever
    }
    bool pop(uint64_t& number, int32_t& result) {
        if (back_.empty()) return false;
        std::tie(number, result) = back_.back();
        back_.pop_back();
        return true;
    }
    bool inherited() const { return false; }

    static inline PreadFunction pread_ = nullptr;

  private:
    std::vector<std::pair<uint64_t, int32_t>> back_;
};

std::unique_ptr<Reader> make_uring(const ReaderOptions& options, uint32_t depth, PreadFunction pread) {
    PreadRing::pread_ = pread;
    return std::make_unique<Uring<PreadRing>>(options, depth);
}

using Check = std::function<void(const Completion&, const Reader&, const uint8_t*)>;

void with_pread(PreadFunction pread, const PatternFile& file, const ReaderOptions& options, const Check& check) {
    std::unique_ptr<Reader> readers[] = {make_sync(options, pread), make_threads(options, 1, pread),
                                         make_uring(options, 1, pread)};
    for (const auto& reader : readers) {
        calls = 0;
        misaligned = false;
        const auto memory = aligned_memory(kBytes);
        const auto done = read_one(*reader, {file.direct(), 9, 0, memory.get(), kBytes});
        CHECK_EQ(done.tag, 9u);
        CHECK(!misaligned);
        check(done, *reader, memory.get());
    }
}

void injected(const PatternFile& file) {
    const Check whole = [](const Completion& done, const Reader& reader, const uint8_t* memory) {
        CHECK_EQ(done.error, 0);
        CHECK(is_pattern(memory, 0, kBytes));
        CHECK_EQ(reader.counters().reads, uint64_t{1});
        CHECK_EQ(reader.counters().bytes, uint64_t{kBytes});
        CHECK_EQ(reader.counters().retries, static_cast<uint64_t>(calls - 1));
        CHECK(calls > 1);
    };
    with_pread(short_pread, file, {}, whole);
    with_pread(interrupted_pread, file, {}, whole);
    with_pread(eio_once_pread, file, {}, whole);
    with_pread(again_pread, file, {}, [](const Completion& done, const Reader& reader, const uint8_t*) {
        CHECK_EQ(done.error, EAGAIN);  // not for ever
        CHECK_EQ(done.fail_offset, uint64_t{0});
        CHECK_EQ(reader.counters().reads, uint64_t{0});
    });
    const auto bad_block = [](int expected_calls) {
        return [expected_calls](const Completion& done, const Reader& reader, const uint8_t* memory) {
            CHECK_EQ(done.error, EIO);
            CHECK_EQ(done.fail_offset, static_cast<uint64_t>(kBadByte));
            CHECK(is_pattern(memory, 0, kBadByte));
            CHECK_EQ(reader.counters().reads, uint64_t{0});
            CHECK_EQ(reader.counters().bytes, uint64_t{0});
            CHECK_EQ(calls.load(), expected_calls);
        };
    };
    with_pread(bad_block_pread, file, {}, bad_block(3));  // up to it, at it, once more
    // Two pieces before it, it twice, and none behind it.
    with_pread(bad_block_pread, file, {8, 2 * kBlock}, bad_block(2 + 3));
}

// Of pieces that were started together and fail the last one first, the first of the file is reported.
void fails_out_of_order(const PatternFile& file) {
    calls = 0;
    const auto memory = aligned_memory(kBytes);
    const auto reader = make_uring({8, 2 * kBlock}, 8, bad_end_pread);
    const auto done = read_one(*reader, {file.direct(), 9, 0, memory.get(), kBytes});
    CHECK_EQ(done.error, EIO);
    CHECK_EQ(done.fail_offset, static_cast<uint64_t>(kBadByte));
    CHECK(is_pattern(memory.get(), 0, kBadByte));
    CHECK_EQ(calls.load(), 2 + 3 + 5 * 2);  // two whole, one up to it and twice at it, five behind it twice
    CHECK_EQ(reader->counters().reads, uint64_t{0});
}

void early_end() {
    const PatternFile file(10000);
    for (const auto& name : members()) {
        for (const uint64_t split : {uint64_t{0}, uint64_t{kBlock}}) {
            for (const int fd : {file.direct(), file.buffered()}) {
                const auto memory = aligned_memory(kBytes);
                const auto reader = make_reader(name, {8, split});
                auto done = read_one(*reader, {fd, 1, 0, memory.get(), 4 * kBlock});
                CHECK_EQ(done.error, ENODATA);
                CHECK_EQ(done.fail_offset, uint64_t{10000});
                CHECK(is_pattern(memory.get(), 0, 10000));
                done = read_one(*reader, {fd, 2, 8 * kBlock, memory.get(), kBlock});
                CHECK_EQ(done.error, ENODATA);
                CHECK_EQ(done.fail_offset, uint64_t{8 * kBlock});
                done = read_one(*reader, {fd, 3, 0, memory.get(), 2 * kBlock});  // and it still reads
                CHECK_EQ(done.error, 0);
                CHECK_EQ(reader->counters().reads, uint64_t{1});
            }
        }
    }
}

void bad_descriptor(const PatternFile& file) {
    for (const auto& name : members()) {
        const auto memory = aligned_memory(2 * kBytes);
        const auto reader = make_reader(name, {8, 3 * kBlock});
        const int fd = dup(file.buffered());
        close(fd);
        reader->submit({fd, 1, 7 * kBlock, memory.get(), kBytes}, Urgency::demand);
        reader->submit({file.buffered(), 2, 0, memory.get() + kBytes, kBytes}, Urgency::demand);
        const auto all = reap_all(*reader);
        CHECK_EQ(all.size(), size_t{2});
        for (const auto& done : all) {
            CHECK_EQ(done.error, done.tag == 1 ? EBADF : 0);
            if (done.tag == 1) CHECK_EQ(done.fail_offset, uint64_t{7 * kBlock});
        }
        CHECK(is_pattern(memory.get() + kBytes, 0, kBytes));
        // Memory that cannot be written: an error of this read and nothing worse.
        const auto done = read_one(*reader, {file.buffered(), 3, 0, reinterpret_cast<void*>(kBlock), kBlock});
        CHECK_EQ(done.error, EFAULT);
    }
}

// io_uring's short reads: a pipe gives what it has.
void short_uring() {
    if (!have_uring()) return;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    const auto memory = aligned_memory(kBytes);
    const auto reader = make_reader("uring:2", {});
    reader->submit({ends[0], 1, 0, memory.get(), kBytes}, Urgency::demand);
    Completion done;
    // A block at a time, each taken before the next is there.
    for (uint32_t at = 0; at < kBytes; at += kBlock) {
        CHECK_EQ(write(ends[1], pattern().data() + at, kBlock), ssize_t{kBlock});
        while (at + kBlock < kBytes && reader->counters().retries <= at / kBlock) {
            CHECK_EQ(reader->reap({&done, 1}, false), size_t{0});
            std::this_thread::yield();
        }
    }
    const auto all = reap_all(*reader);
    CHECK(all.size() == 1 && all[0].error == 0);
    CHECK(is_pattern(memory.get(), 0, kBytes));
    CHECK_EQ(reader->counters().retries, uint64_t{kBytes / kBlock - 1});
    // The other end goes away: the file ended early.
    reader->submit({ends[0], 2, 0, memory.get(), kBytes}, Urgency::demand);
    close(ends[1]);
    const auto ended = reap_all(*reader);
    CHECK(ended.size() == 1 && ended[0].error == ENODATA);
    close(ends[0]);
}

// Destroyed with reads in flight: started ones are waited for, queued ones never start.
void destroyed(const PatternFile& file) {
    for (const auto& name : members()) {
        constexpr uint32_t kReads = 64;
        const auto memory = aligned_memory(size_t{kReads} * kBytes);
        auto reader = make_reader(name, {kReads, 5 * kBlock});
        for (uint32_t tag = 0; tag < kReads; ++tag) {
            reader->submit({file.direct(), tag, tag * uint64_t{kBlock}, memory.get() + size_t{tag} * kBytes, kBytes},
                           tag % 2 == 0 ? Urgency::demand : Urgency::speculative);
        }
        reader.reset();
        // Now nothing may write any more: a sanitizer or the next owner would notice, and so do we.
        std::memset(memory.get(), 0, size_t{kReads} * kBytes);
        CHECK(is_filled(memory.get(), size_t{kReads} * kBytes, 0));
    }
    if (!have_uring()) return;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    const auto memory = aligned_memory(2 * kBlock);
    auto reader = make_reader("uring:1", {});
    reader->submit({ends[0], 0, 0, memory.get(), 1}, Urgency::demand);
    reader->submit({file.direct(), 1, 0, memory.get() + kBlock, kBlock}, Urgency::demand);
    std::thread writer([&] { CHECK_EQ(write(ends[1], "x", 1), ssize_t{1}); });
    reader.reset();
    CHECK_EQ(memory[0], 'x');
    CHECK(is_filled(memory.get() + kBlock, kBlock, 0));
    writer.join();
    close(ends[0]);
    close(ends[1]);
}

// The exit code of what a child does.
int in_child(const std::function<bool()>& body) {
    const pid_t child = fork();
    if (child == 0) _exit(body() ? 0 : 1);
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) std::abort();
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// A child of fork destroys what it inherited; the parent's reads go on.
void forked(const PatternFile& file) {
    for (const auto& name : members()) {
        const auto memory = aligned_memory(8 * kBytes);
        auto reader = make_reader(name, {});
        for (uint32_t tag = 0; tag < 8; ++tag) {
            reader->submit({file.direct(), tag, tag * uint64_t{kBlock}, memory.get() + size_t{tag} * kBytes, kBytes},
                           Urgency::demand);
        }
        CHECK_EQ(in_child([&] {
            reader.reset();
            return true;
        }), 0);
        CHECK_EQ(reap_all(*reader).size(), size_t{8});
        for (uint32_t tag = 0; tag < 8; ++tag) {
            CHECK(is_pattern(memory.get() + size_t{tag} * kBytes, tag * uint64_t{kBlock}, kBytes));
        }
    }
}

// From now on this process gets EPERM for that system call, as in a container.
void forbid(uint32_t call) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) std::abort();
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) std::abort();
}

void refused() {
    for (const uint32_t call : {uint32_t{SYS_io_uring_setup}, uint32_t{SYS_io_uring_enter}}) {
        CHECK_EQ(in_child([call] {
            forbid(call);
            try {
                make_reader("uring:24", {});
            } catch (const Error& error) {
                const std::string what = error.what();
                return error.kind == ErrorKind::unsupported && what.find("threads") != std::string::npos &&
                       what.find('\n') == std::string::npos;
            }
            return false;
        }), 0);
    }
    // The fallback it names works there.
    CHECK_EQ(in_child([] {
        forbid(SYS_io_uring_setup);
        return make_reader("sync", {}) != nullptr;
    }), 0);
}

}  // namespace

int main() {
    refused();
    const PatternFile file(1 << 20);
    injected(file);
    fails_out_of_order(file);
    early_end();
    bad_descriptor(file);
    short_uring();
    destroyed(file);
    forked(file);
    return exit_code();
}
