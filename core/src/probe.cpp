#include "moestream/probe.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "moestream/error.h"
#include "moestream/reader.h"
#include "moestream/slab_index.h"
#include "stores/warmer.h"

namespace moestream {
namespace {

constexpr uint64_t kHuge = 2 << 20;
constexpr uint64_t kLine = 64;

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

[[noreturn]] void io_error(const std::string& what, int error) {
    throw Error(ErrorKind::io, what + ": " + std::strerror(error));
}

class Descriptors {
  public:
    Descriptors(const std::vector<std::string>& files, bool direct) {
        for (const auto& file : files) {
            const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
            if (fd < 0) {
                const int error = errno;
                close_all();
                throw Error(ErrorKind::io, file + " cannot be opened: " + why_not_opened(error));
            }
            fds_.push_back(fd);
        }
    }
    ~Descriptors() { close_all(); }
    Descriptors(const Descriptors&) = delete;
    Descriptors& operator=(const Descriptors&) = delete;
    int operator[](size_t file) const { return fds_[file]; }

  private:
    void close_all() {
        for (const int fd : fds_) close(fd);
    }
    std::vector<int> fds_;
};

// Anonymous memory, every page of what is used there before the clock starts.
class Buffer {
  public:
    Buffer(uint64_t bytes, bool huge) : bytes_(bytes) {
        void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) io_error("memory for the probe", errno);
        base_ = static_cast<char*>(base);
        // Where the system's setting is `always`, small pages have to be asked for too. A kernel without huge pages
        // refuses both; it gives what the second asks for.
        if (madvise(base_, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) != 0 && huge) {
            const int error = errno;
            munmap(base_, bytes_);
            throw Error(ErrorKind::unsupported, std::string("huge pages: ") + std::strerror(error));
        }
    }
    ~Buffer() { munmap(base_, bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    char* base() const { return base_; }

  private:
    char* base_ = nullptr;
    uint64_t bytes_;
};

int advice_value(const std::string& advice) {
    return advice == "random" ? MADV_RANDOM : advice == "sequential" ? MADV_SEQUENTIAL : MADV_NORMAL;
}

class Mapping {
  public:
    Mapping(const std::string& file, int fd, const std::string& advice) {
        struct stat status {};
        if (fstat(fd, &status) != 0) io_error(file, errno);
        bytes_ = static_cast<uint64_t>(status.st_size);
        void* base = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) io_error(file + " cannot be mapped", errno);
        base_ = static_cast<char*>(base);
        if (madvise(base_, bytes_, advice_value(advice)) != 0) {
            const int error = errno;
            munmap(base_, bytes_);
            throw Error(ErrorKind::unsupported, "madvise " + advice + ": " + std::strerror(error));
        }
    }
    ~Mapping() { munmap(base_, bytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    char* base() const { return base_; }
    uint64_t bytes() const { return bytes_; }

  private:
    char* base_ = nullptr;
    uint64_t bytes_ = 0;
};

class Stopwatch {
  public:
    Stopwatch() : cpu_(cpu()), start_(std::chrono::steady_clock::now()) {}
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    void stop(ProbeTiming& timing) const {
        timing.seconds = seconds();
        timing.cpu_seconds = cpu() - cpu_;
    }

  private:
    static double cpu() {
        rusage usage{};
        getrusage(RUSAGE_SELF, &usage);
        const auto s = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; };
        return s(usage.ru_utime) + s(usage.ru_stime);
    }
    double cpu_;
    std::chrono::steady_clock::time_point start_;
};

uint32_t check(const std::vector<std::string>& files, std::span<const ProbeRange> ranges, bool direct) {
    uint32_t largest = 0;
    for (const auto& range : ranges) {
        if (range.file >= files.size() || range.bytes == 0) throw Error(ErrorKind::usage, "probe: a range of no file");
        if (direct && (range.offset % kPage != 0 || range.bytes % kPage != 0)) {
            throw Error(ErrorKind::usage, "probe: a direct read is of whole pages");
        }
        largest = std::max(largest, range.bytes);
    }
    return largest;
}

// Places for reads to land: each starts at an address that is a multiple of `alignment` and, below a huge page, of
// nothing larger.
class Places {
  public:
    Places(const ProbeReads& options, uint32_t largest)
        : stride_(round_up(std::max(largest, 1U), kHuge)),
          count_(std::clamp<uint64_t>(options.buffer_bytes / stride_, 1, options.in_flight)),
          buffer_((count_ + 2) * stride_, options.huge) {
        const auto address = reinterpret_cast<uintptr_t>(buffer_.base());
        const uint64_t past = options.alignment < kHuge ? options.alignment : 0;
        first_ = buffer_.base() + (round_up(address, kHuge) - address) + past;
        for (uint64_t i = 0; i < count_; ++i) std::memset(first_ + i * stride_, 1, largest);
    }
    char* place(uint64_t number) const { return first_ + number % count_ * stride_; }

  private:
    uint64_t stride_;
    uint64_t count_;
    Buffer buffer_;
    char* first_ = nullptr;
};

uint64_t touch(const char* data, uint64_t bytes) {
    uint64_t sum = 0;
    for (uint64_t at = 0; at < bytes; at += kLine) sum += static_cast<unsigned char>(data[at]);
    return sum;
}

}  // namespace

ProbeTiming probe_reads(const ProbeReads& options, std::span<const ProbeRange> ranges) {
    const uint32_t largest = check(options.files, ranges, options.direct);
    if (options.in_flight == 0) throw Error(ErrorKind::usage, "probe: at least one read is in flight");
    if (options.alignment < kPage || (options.alignment & (options.alignment - 1)) != 0) {
        throw Error(ErrorKind::usage, "probe: an alignment is a power of two of at least a page");
    }
    const Descriptors files(options.files, options.direct);
    const Places places(options, largest);
    const auto reader = make_reader(options.reader, {options.in_flight, options.split_bytes});
    ProbeTiming timing;
    std::array<Completion, 64> done;
    size_t next = 0;
    const Stopwatch watch;
    while (true) {
        while (next < ranges.size() && reader->in_flight() < options.in_flight && watch.seconds() < options.seconds) {
            const auto& range = ranges[next];
            reader->submit({files[range.file], static_cast<uint32_t>(next), range.offset, places.place(next), range.bytes},
                           Urgency::demand);
            ++next;
        }
        const size_t finished = reader->reap(done, true);
        if (finished == 0) break;
        for (size_t i = 0; i < finished; ++i) {
            const auto& range = ranges[done[i].tag];
            if (done[i].error != 0) {
                io_error("read of " + options.files[range.file] + " at " + std::to_string(done[i].fail_offset),
                         done[i].error);
            }
            timing.bytes += range.bytes;
            ++timing.reads;
        }
    }
    watch.stop(timing);
    return timing;
}

ProbeTiming probe_mapping(const ProbeMapping& options, std::span<const ProbeRange> ranges) {
    check(options.files, ranges, false);
    if (options.route == 0) throw Error(ErrorKind::usage, "probe: a route has at least one range");
    const Descriptors files(options.files, false);
    std::vector<std::unique_ptr<Mapping>> mappings;
    for (size_t i = 0; i < options.files.size(); ++i) {
        mappings.push_back(std::make_unique<Mapping>(options.files[i], files[i], options.advice));
    }
    std::vector<MappedSlab> slabs;
    for (const auto& range : ranges) {
        // A touch past the end would end the process.
        const uint64_t end = round_up(mappings[range.file]->bytes(), kPage);
        if (range.offset > end || range.bytes > end - range.offset) {
            throw Error(ErrorKind::usage, "probe: a range past the end of " + options.files[range.file]);
        }
        slabs.push_back({mappings[range.file]->base() + range.offset, files[range.file], -1, range.offset, range.bytes,
                         static_cast<uint32_t>(slabs.size())});
    }
    std::string refused;
    const auto note = [&](const std::string& text) { refused = text; };
    const auto warmer = make_warmer(options.warmer, {kPage, false, advice_value(options.advice),
                                                     static_cast<uint32_t>(slabs.size()), note});
    if (!refused.empty()) throw Error(ErrorKind::unsupported, refused);
    ProbeTiming timing;
    uint64_t sum = 0;
    const Stopwatch watch;
    for (size_t first = 0; first < slabs.size() && watch.seconds() < options.seconds;) {
        const size_t count = std::min<size_t>(options.route, slabs.size() - first);
        const std::span route(slabs.data() + first, count);
        const auto outcome = warmer->warm(route);
        if (outcome.error != 0) {
            io_error(options.warmer + " of " + options.files[ranges[outcome.slab.number].file], outcome.error);
        }
        for (const auto& slab : route) {
            if (options.touch) sum += touch(slab.address, slab.bytes);
            timing.bytes += slab.bytes;
        }
        if (const int error = warmer->done(route); error != 0) io_error(options.warmer, error);
        timing.reads += count;
        first += count;
    }
    watch.stop(timing);
    // The sum is wanted by nobody but the optimiser.
    if (sum == UINT64_MAX) throw Error(ErrorKind::internal, "probe: impossible sum");
    return timing;
}

ProbeTiming probe_copies(uint32_t threads, uint64_t bytes, double seconds) {
    if (threads == 0 || bytes / 2 / threads < kPage) throw Error(ErrorKind::usage, "probe: too little to copy");
    const uint64_t half = bytes / 2;
    const uint64_t share = half / threads;
    const Buffer buffer(round_up(bytes, kHuge), false);
    std::memset(buffer.base(), 1, bytes);
    std::atomic<uint64_t> copied{0};
    std::barrier gate(threads + 1);
    std::vector<std::jthread> workers;
    for (uint32_t number = 0; number < threads; ++number) {
        workers.emplace_back([&, number] {
            gate.arrive_and_wait();
            const Stopwatch own;
            do {
                std::memcpy(buffer.base() + half + number * share, buffer.base() + number * share, share);
                copied += share;
            } while (own.seconds() < seconds);
        });
    }
    ProbeTiming timing;
    gate.arrive_and_wait();
    const Stopwatch watch;
    workers.clear();  // joins
    watch.stop(timing);
    timing.bytes = copied;
    timing.reads = copied / share;
    return timing;
}

}  // namespace moestream
