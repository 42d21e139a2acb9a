#include "scratch.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace moestream {

Scratch::Scratch(const WarmerOptions& options)
    : buffers_(1, kBytes, options.alignment, options.huge, options.fallback) {}

int Scratch::read_through(int fd, uint64_t offset, uint64_t bytes) const {
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t want = std::min(kBytes, bytes - done);
        const ssize_t got = pread(fd, data(), want, static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return ENODATA;
        done += static_cast<uint64_t>(got);
    }
    return 0;
}

}  // namespace moestream
