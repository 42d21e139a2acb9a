// Reads past the page cache: whether a file can be read so, and at which multiples. What the kernel says of the file
// comes first (statx), and a few reads prove it; where it says nothing they are all there is.
#pragma once
#include <cstdint>
#include <string>

namespace moestream {

struct DirectReads {
    int fd = -1;             // opened with O_DIRECT, the caller's to close; -1: no such reads, and `refusal` says why
    uint32_t alignment = 0;  // what offsets and lengths must be multiples of; a page is always one
    std::string refusal;
};

// Never throws. Refused also where they would be so only in name: a file whose extents are compressed is decompressed
// through the page cache, and one that needs more than whole pages cannot land in place.
DirectReads open_direct(const std::string& path);

}  // namespace moestream
