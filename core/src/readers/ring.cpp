#include "readers/ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "moestream/error.h"
#include "stores/pages.h"

namespace moestream {
namespace {

// No COOP_TASKRUN or DEFER_TASKRUN: neither the caller's time nor the processor's changed with them, completions would
// hide from pop() until the next system call, and SINGLE_ISSUER forbids loading on one thread and decoding on another.
constexpr uint32_t kSetupFlags = IORING_SETUP_CLAMP;
// Both came with or before the read operation that we use (kernel 5.6).
constexpr uint32_t kFeatures = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorKind::unsupported,
                "io_uring is refused (" + what +
                    "): use threads:4, or allow it (sysctl kernel.io_uring_disabled=0; a container's seccomp profile)");
}

[[noreturn]] void refuse(const char* call, int error) { refuse(std::string(call) + ": " + std::strerror(error)); }

}  // namespace

Ring::Descriptor::~Descriptor() {
    if (fd >= 0) close(fd);
}

Ring::Shared::~Shared() {
    // In a child of fork other memory may be there by now.
    if (memory != nullptr && getpid() == process) munmap(memory, bytes);
}

Ring::Ring(uint32_t depth) {
    set_up(depth);
    prove();
}

void Ring::set_up(uint32_t depth) {
    io_uring_params params{};
    params.flags = kSetupFlags;
    // The kernel makes the descriptor close-on-exec.
    ring_.fd = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (ring_.fd < 0 && errno == ENOMEM) {  // rings count as locked memory
        raise_lock_limit();
        ring_.fd = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
        if (ring_.fd < 0 && errno == ENOMEM) refuse("its rings count as locked memory: raise `ulimit -l`");
    }
    if (ring_.fd < 0) refuse("io_uring_setup", errno);
    if ((params.features & kFeatures) != kFeatures) refuse("the kernel is older than 5.6");
    map(rings_,
        std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                         params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)),
        IORING_OFF_SQ_RING);
    map(entries_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    sq_tail_ = word(params.sq_off.tail);
    sq_mask_ = *word(params.sq_off.ring_mask);
    sq_array_ = word(params.sq_off.array);
    cq_head_ = word(params.cq_off.head);
    cq_tail_ = word(params.cq_off.tail);
    cq_mask_ = *word(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(rings_.memory + params.cq_off.cqes);
    // Workers beyond the depth would only wait for each other. Kernels before 5.15 have no limit to set, and need none
    // to be right: hence no check.
    uint32_t workers[2] = {depth, 0};
    syscall(SYS_io_uring_register, ring_.fd, IORING_REGISTER_IOWQ_MAX_WORKERS, workers, 2);
}

void Ring::map(Shared& shared, size_t bytes, off_t offset) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_.fd, offset);
    if (found == MAP_FAILED) refuse("mmap of its rings", errno);
    shared.memory = static_cast<char*>(found);
    shared.bytes = bytes;
    shared.process = getpid();
    // A child that wrote to the rings would speak for the parent.
    if (madvise(found, bytes, MADV_DONTFORK) != 0) refuse("madvise of its rings", errno);
}

// A sandbox may allow the ring and forbid its use: one empty operation there and back shows it now, not in a decode.
void Ring::prove() {
    push(0).opcode = IORING_OP_NOP;
    int error = 0;
    uint64_t number = 0;
    int32_t result = 0;
    do {
        if (!enter(1, IORING_ENTER_GETEVENTS, error)) refuse("io_uring_enter", error);
    } while (!pop(number, result));
    if (result < 0) refuse("an empty operation", -result);
}

bool Ring::inherited() const { return getpid() != rings_.process; }

io_uring_sqe& Ring::push(uint64_t number) {
    const uint32_t tail = *sq_tail_;
    io_uring_sqe& sqe = reinterpret_cast<io_uring_sqe*>(entries_.memory)[tail & sq_mask_];
    std::memset(&sqe, 0, sizeof sqe);
    sqe.user_data = number;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    // The kernel looks only when it is entered, on this thread: what is written before that is seen.
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++unsubmitted_;
    return sqe;
}

void Ring::push_read(int fd, uint64_t offset, void* to, uint32_t bytes, uint64_t number) {
    io_uring_sqe& sqe = push(number);
    sqe.opcode = IORING_OP_READ;
    // Building the request is left to the kernel's workers: microseconds for the caller instead of tens.
    sqe.flags = IOSQE_ASYNC;
    sqe.fd = fd;
    sqe.off = offset;
    sqe.addr = reinterpret_cast<uint64_t>(to);
    sqe.len = bytes;
}

// Gives the kernel all that was pushed and, with `complete`, sleeps until that many are back; a signal may end the
// sleep early. False with the errno when the kernel refuses.
bool Ring::enter(uint32_t complete, uint32_t flags, int& error) {
    while (true) {
        const long taken = syscall(SYS_io_uring_enter, ring_.fd, unsubmitted_, complete, flags, nullptr, 0);
        if (taken >= 0) {
            unsubmitted_ -= static_cast<uint32_t>(taken);
            if (unsubmitted_ == 0) return true;
        } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            error = errno;
            return false;
        }
    }
}

void Ring::submit() {
    int error = 0;
    if (unsubmitted_ == 0 || enter(0, 0, error)) return;
    throw Error(ErrorKind::io, std::string("io_uring_enter: ") + std::strerror(error));
}

void Ring::submit_wait() {
    int error = 0;
    if (enter(1, IORING_ENTER_GETEVENTS, error)) return;
    throw Error(ErrorKind::io, std::string("io_uring_enter: ") + std::strerror(error));
}

bool Ring::pop(uint64_t& number, int32_t& result) {
    const uint32_t head = *cq_head_;
    if (head == std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) return false;
    const io_uring_cqe& cqe = cqes_[head & cq_mask_];
    number = cqe.user_data;
    result = cqe.res;
    std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
    return true;
}

}  // namespace moestream
