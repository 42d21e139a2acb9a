// uring:QD: O_DIRECT (or buffered) reads by io_uring, QD of them started at once.
//
// Raw system calls, so that building needs no library. IOSQE_ASYNC hands the submission itself to the kernel's
// workers: the caller pays a few microseconds a slab instead of tens, and the work is done on another core.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "lanes.h"

namespace moestream {
namespace {

constexpr uint32_t kDefaultDepth = 24;
constexpr uint32_t kMaxDepth = 1024;

int enter(int ring, uint32_t submit, uint32_t complete, uint32_t flags) {
    return static_cast<int>(syscall(SYS_io_uring_enter, ring, submit, complete, flags, nullptr, 0));
}

[[noreturn]] void refuse(const char* what, int error) {
    throw Error(ErrorKind::unsupported, std::string("io_uring is refused (") + what + ": " + std::strerror(error) +
                                            "; see kernel.io_uring_disabled and the container's seccomp profile)");
}

// The two rings as the kernel shares them.
class Rings {
  public:
    explicit Rings(uint32_t depth) {
        io_uring_params params{};
        params.flags = IORING_SETUP_CLAMP;
        fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
        if (fd_ < 0) refuse("io_uring_setup", errno);
        if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) {
            close(fd_);
            refuse("the kernel is older than 5.4", ENOSYS);
        }
        bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                  params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
        sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
        memory_ = map(bytes_, IORING_OFF_SQ_RING);
        sqes_ = reinterpret_cast<io_uring_sqe*>(map(sqe_bytes_, IORING_OFF_SQES));
        sq_tail_ = word(params.sq_off.tail);
        sq_mask_ = *word(params.sq_off.ring_mask);
        sq_array_ = word(params.sq_off.array);
        cq_head_ = word(params.cq_off.head);
        cq_tail_ = word(params.cq_off.tail);
        cq_mask_ = *word(params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(memory_ + params.cq_off.cqes);
        // Workers beyond the depth would only wait for each other. An old kernel has no such limit to set.
        uint32_t workers[2] = {depth, 0};
        syscall(SYS_io_uring_register, fd_, IORING_REGISTER_IOWQ_MAX_WORKERS, workers, 2);
    }
    ~Rings() {
        munmap(sqes_, sqe_bytes_);
        munmap(memory_, bytes_);
        close(fd_);
    }
    Rings(const Rings&) = delete;
    Rings& operator=(const Rings&) = delete;

    void push(const Progress& progress, uint64_t data) {
        const uint32_t tail = *sq_tail_;
        io_uring_sqe& sqe = sqes_[tail & sq_mask_];
        sqe = {};
        sqe.opcode = IORING_OP_READ;
        sqe.flags = IOSQE_ASYNC;
        sqe.fd = progress.read.fd;
        sqe.off = progress.offset();
        sqe.addr = reinterpret_cast<uint64_t>(progress.address());
        sqe.len = progress.bytes();
        sqe.user_data = data;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
        ++unsubmitted_;
    }
    // Tells the kernel; with `sleep` returns only when a completion is there. Throws Error(io) when it cannot.
    void submit(bool sleep) {
        while (unsubmitted_ > 0 || sleep) {
            const int taken = enter(fd_, unsubmitted_, sleep ? 1 : 0, sleep ? IORING_ENTER_GETEVENTS : 0);
            if (taken < 0 && (errno == EINTR || errno == EAGAIN || errno == EBUSY)) continue;
            if (taken < 0) throw Error(ErrorKind::io, std::string("io_uring_enter: ") + std::strerror(errno));
            unsubmitted_ -= static_cast<uint32_t>(taken);
            if (unsubmitted_ == 0) return;
        }
    }
    bool pop(uint64_t& data, int32_t& result) {
        const uint32_t head = *cq_head_;
        if (head == std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) return false;
        const io_uring_cqe& cqe = cqes_[head & cq_mask_];
        data = cqe.user_data;
        result = cqe.res;
        std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
        return true;
    }

  private:
    char* map(size_t bytes, off_t offset) {
        void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
        if (found == MAP_FAILED) refuse("mapping its rings", errno);
        madvise(found, bytes, MADV_DONTFORK);
        return static_cast<char*>(found);
    }
    uint32_t* word(uint32_t offset) { return reinterpret_cast<uint32_t*>(memory_ + offset); }

    int fd_ = -1;
    size_t bytes_ = 0;
    size_t sqe_bytes_ = 0;
    char* memory_ = nullptr;
    io_uring_sqe* sqes_ = nullptr;
    uint32_t* sq_tail_ = nullptr;
    uint32_t* sq_array_ = nullptr;
    uint32_t* cq_head_ = nullptr;
    uint32_t* cq_tail_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    uint32_t sq_mask_ = 0;
    uint32_t cq_mask_ = 0;
    uint32_t unsubmitted_ = 0;
};

class Uring : public Reader {
  public:
    Uring(const ReaderOptions& options, uint32_t depth)
        : rings_(depth), lanes_(options.max_queued), slots_(depth) {
        for (uint32_t slot = depth; slot-- > 0;) free_.push_back(slot);
    }
    ~Uring() override {
        // The kernel may still write into destinations: nothing is torn down under it.
        lanes_.drop_speculative([](const Read&) {});
        Completion completion;
        while (in_flight() > 0) reap({&completion, 1}, true);
    }

    void submit(const Read& read, Urgency urgency) override {
        const uint64_t start = monotonic_ns();
        lanes_.push(read, urgency);
        start_queued();
        rings_.submit(false);
        counters_.submit_ns += monotonic_ns() - start;
    }

    size_t reap(std::span<Completion> out, bool wait) override {
        size_t count = take(out);
        while (count == 0 && wait && in_flight() > 0) {
            const uint64_t start = monotonic_ns();
            rings_.submit(true);
            counters_.wait_ns += monotonic_ns() - start;
            count = take(out);
        }
        return count;
    }

    void drop_speculative(const std::function<void(const Read&)>& dropped) override {
        lanes_.drop_speculative(dropped);
    }
    void promote(uint32_t tag) override { lanes_.promote(tag); }
    size_t in_flight() const override { return lanes_.size() + slots_.size() - free_.size(); }
    const ReaderCounters& counters() const override { return counters_; }

  private:
    void start_queued() {
        while (!free_.empty() && !lanes_.empty()) {
            const uint32_t slot = free_.back();
            free_.pop_back();
            slots_[slot] = Progress{lanes_.pop()};
            rings_.push(slots_[slot], slot);
        }
    }
    size_t take(std::span<Completion> out) {
        size_t count = 0;
        uint64_t slot = 0;
        int32_t result = 0;
        while (count < out.size() && rings_.pop(slot, result)) {
            if (advance(slots_[slot], result, counters_, out[count]) == Next::again) {
                rings_.push(slots_[slot], slot);
                continue;
            }
            ++count;
            free_.push_back(static_cast<uint32_t>(slot));
        }
        start_queued();
        rings_.submit(false);
        return count;
    }

    Rings rings_;
    Lanes lanes_;
    std::vector<Progress> slots_;  // started reads, by the number the kernel gives back
    std::vector<uint32_t> free_;
    ReaderCounters counters_;
};

const ReaderRegistration registration(
    "uring", "io_uring, QD reads started at once (default 24)",
    [](const ReaderOptions& options, const std::string& argument) -> std::unique_ptr<Reader> {
        uint32_t depth = kDefaultDepth;
        if (!argument.empty()) {
            const auto [end, error] = std::from_chars(argument.data(), argument.data() + argument.size(), depth);
            if (error != std::errc() || end != argument.data() + argument.size() || depth < 1 || depth > kMaxDepth) {
                throw Error(ErrorKind::usage, "uring:QD takes a depth from 1 to 1024, not '" + argument + "'");
            }
        }
        return std::make_unique<Uring>(options, depth);
    });

}  // namespace
}  // namespace moestream
