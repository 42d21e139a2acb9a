#include "pages.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "moestream/error.h"
#include "moestream/slab_index.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace moestream {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

int access_of(bool closed) { return closed ? PROT_NONE : PROT_READ | PROT_WRITE; }

void set_advice(void* base, size_t bytes) {
    // Advice, not needed for correctness: a kernel built without one of these has nothing to switch off.
    madvise(base, bytes, MADV_NOHUGEPAGE);
    madvise(base, bytes, MADV_DONTFORK);
    madvise(base, bytes, MADV_DONTDUMP);
}

}  // namespace

char* reserve(size_t bytes, size_t alignment, void* fixed, bool closed) {
    const size_t slack = fixed != nullptr || alignment <= kPage ? 0 : alignment;
    void* found = mmap(fixed, bytes + slack, access_of(closed), kAnonymous | (fixed != nullptr ? MAP_FIXED : 0), -1, 0);
    if (found == MAP_FAILED) {
        throw Error(ErrorKind::refused, "no address space for " + std::to_string(bytes) + " bytes (" +
                                            std::strerror(errno) + "): " + mappings_remedy());
    }
    char* base = static_cast<char*>(found);
    if (slack > 0) {
        char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + slack - 1) / slack * slack);
        if (aligned > base) munmap(base, static_cast<size_t>(aligned - base));
        const size_t tail = static_cast<size_t>(base + slack - aligned);
        const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
        if (tail > 0) munmap(aligned + rounded, tail);
        base = aligned;
    }
    set_advice(base, bytes);
    return base;
}

std::string mappings_remedy() {
    std::string bounded;
    for (const auto& [resource, name] : {std::pair{RLIMIT_AS, "`ulimit -v`"}, std::pair{RLIMIT_DATA, "`ulimit -d`"}}) {
        rlimit limit{};
        if (getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) bounded += std::string(name) + " or ";
    }
    return "raise " + bounded + "vm.max_map_count";
}

void release(void* base, size_t bytes) {
    if (base != nullptr) munmap(base, bytes);
}

PagePool::PagePool(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge) {
    base_ = reserve(bytes_, kHuge);
    madvise(base_, bytes_, MADV_HUGEPAGE);
    if (madvise(base_, bytes_, MADV_POPULATE_WRITE) != 0) {
        const int error = errno;
        if (error != EINVAL) {
            release(base_, bytes_);
            throw Error(ErrorKind::refused, "no memory for an expert budget of " + std::to_string(bytes) +
                                                " bytes (" + std::strerror(error) + "): name a smaller one");
        }
        for (size_t at = 0; at < bytes_; at += kPage) base_[at] = 0;  // kernels before 5.14
    }
    // Huge pages already there stay; without the advice the ranges that vacate pages look like every other region.
    madvise(base_, bytes_, MADV_NOHUGEPAGE);
}

PagePool::~PagePool() { release(base_, bytes_); }

PagePool::PagePool(PagePool&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

PagePool& PagePool::operator=(PagePool&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

int move_pages(char* from, char* to, size_t bytes, bool restore) {
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    if (mremap(from, bytes, bytes, flags, to) == MAP_FAILED) return errno;
    if (!restore) return 0;
    if (mmap(from, bytes, PROT_READ | PROT_WRITE, kAnonymous | MAP_FIXED, -1, 0) == MAP_FAILED) return errno;
    set_advice(from, bytes);
    return 0;
}

int map_again(char* at, size_t bytes, bool closed) {
    void* found = mmap(at, bytes, access_of(closed), kAnonymous | MAP_FIXED_NOREPLACE, -1, 0);
    if (found == MAP_FAILED) return errno;
    set_advice(at, bytes);
    return 0;
}

// Without DONTUNMAP the vacated range would be free until it is mapped again, and another thread's mmap could take it.
std::string move_refused() {
    char* pages = reserve(2 * kPage, kPage);
    *pages = 1;
    const int error = move_pages(pages, pages + kPage, kPage, false);
    release(pages, 2 * kPage);
    if (error == 0) return "";
    return std::string("mremap(MREMAP_DONTUNMAP) is refused (") + std::strerror(error) +
           "): Linux 5.7 or newer has it, where no sandbox forbids it";
}

std::string populate_refused() {
    char* page = reserve(kPage, kPage);
    const int error = madvise(page, kPage, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    release(page, kPage);
    if (error == 0) return "";
    return std::string("MADV_POPULATE_WRITE is refused (") + std::strerror(error) +
           "): Linux 5.14 or newer has it, where no sandbox forbids it";
}

void raise_lock_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_MEMLOCK, &limit);  // up to one's own hard limit it is never refused
}

int open_pages(char* at, size_t bytes) { return mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : errno; }

// A new mapping: taking the leave to write away leaves pages, and what they were committed for, as they are.
int close_pages(char* at, size_t bytes) {
    if (mmap(at, bytes, PROT_NONE, kAnonymous | MAP_FIXED, -1, 0) == MAP_FAILED) return errno;
    set_advice(at, bytes);
    return 0;
}

uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

}  // namespace moestream
