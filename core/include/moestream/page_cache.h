// How much of an open file is in the page cache, as the kernel tells whoever asks. Each returns 0 or errno.
#pragma once
#include <cstdint>
#include <span>
#include <utility>

namespace moestream {

// Of the whole file, by cachestat (Linux 6.5 and newer).
int count_cached_bytes(int fd, uint64_t& bytes);

// Of the pages of these ranges (offset, bytes), by mincore: to who neither owns the file nor could write to it the kernel
// says that all is there.
int count_resident_bytes(int fd, std::span<const std::pair<uint64_t, uint64_t>> ranges, uint64_t& bytes);

}  // namespace moestream
