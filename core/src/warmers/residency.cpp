#include "residency.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "moestream/slab_index.h"

namespace moestream {
namespace {

constexpr long kCachestat = 451;  // the same on every architecture

// The kernel's cachestat_range and cachestat.
struct Range {
    uint64_t offset = 0, bytes = 0;
};
struct Counts {
    uint64_t cached = 0, dirty = 0, writeback = 0, evicted = 0, recently_evicted = 0;
};

}  // namespace

int count_cached(int fd, uint64_t offset, uint64_t bytes, uint64_t& cached) {
    Range range{offset, bytes};
    Counts counts;
    if (syscall(kCachestat, fd, &range, &counts, 0) != 0) return errno;
    cached = counts.cached;
    return 0;
}

std::string cachestat_refused(const std::string& path, int fd) {
    uint64_t cached = 0;
    const int error = count_cached(fd, 0, kPage, cached);
    if (error == 0) return "";
    return "cachestat is refused on " + path + " (" + std::strerror(error) +
           "): Linux 6.5 or newer has it for files of one's own, hybrid:mincore asks the same";
}

std::string mincore_refused() {
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char there = 0;
    const int error = page == MAP_FAILED || mincore(page, kPage, &there) != 0 ? errno : 0;
    if (page != MAP_FAILED) munmap(page, kPage);
    if (error == 0) return "";
    return std::string("mincore is refused (") + std::strerror(error) +
           "): allow it in the sandbox, or use mapped+pread, which does not ask";
}

}  // namespace moestream
