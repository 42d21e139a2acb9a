// What of a file is in the page cache: two questions a kernel may refuse to answer.
#pragma once
#include <cstdint>
#include <string>

namespace moestream {

// Pages of [offset, offset + bytes) that are cached. 0 or errno.
int count_cached(int fd, uint64_t offset, uint64_t bytes, uint64_t& cached);

// '' where the question is answered (of a file: of this one), else one line that says why not and what would help.
std::string cachestat_refused(const std::string& path, int fd);
std::string mincore_refused();

}  // namespace moestream
