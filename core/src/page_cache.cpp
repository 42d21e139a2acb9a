#include "moestream/page_cache.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "moestream/slab_index.h"
#include "warmers/residency.h"

namespace moestream {
namespace {

// Of `size` bytes mapped at `base`.
int count_present(char* base, uint64_t size, std::pair<uint64_t, uint64_t> range, uint64_t& bytes) {
    const uint64_t first = range.first / kPage;
    const uint64_t last = (std::min(range.first + range.second, size) + kPage - 1) / kPage;
    if (last <= first) return 0;
    std::vector<unsigned char> present(last - first);
    if (mincore(base + first * kPage, present.size() * kPage, present.data()) != 0) return errno;
    const auto there = std::count_if(present.begin(), present.end(), [](unsigned char page) { return (page & 1) != 0; });
    bytes += static_cast<uint64_t>(there) * kPage;
    return 0;
}

}  // namespace

int count_cached_bytes(int fd, uint64_t& bytes) {
    uint64_t pages = 0;
    const int error = count_cached(fd, 0, 0, pages);  // no length: to the end of the file
    bytes = pages * kPage;
    return error;
}

int count_resident_bytes(int fd, std::span<const std::pair<uint64_t, uint64_t>> ranges, uint64_t& bytes) {
    bytes = 0;
    struct stat status {};
    if (fstat(fd, &status) != 0) return errno;
    const auto size = static_cast<uint64_t>(status.st_size);
    if (size == 0) return 0;
    void* base = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return errno;
    int error = 0;
    for (const auto& range : ranges) {
        if (error == 0) error = count_present(static_cast<char*>(base), size, range, bytes);
    }
    munmap(base, size);
    return error;
}

}  // namespace moestream
