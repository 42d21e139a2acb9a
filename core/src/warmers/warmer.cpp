#include "../stores/warmer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "moestream/slab_index.h"

namespace moestream {

int advise_willneed(const MappedSlab& slab) {
    // madvise refuses an unaligned start: round outward, a neighbour's page costs less than a fault.
    const auto address = reinterpret_cast<uintptr_t>(slab.address);
    const uintptr_t start = address / kPage * kPage;
    return madvise(reinterpret_cast<void*>(start), address + slab.bytes - start, MADV_WILLNEED) == 0 ? 0 : errno;
}

int read_through(const MappedSlab& slab, char* scratch, uint64_t scratch_bytes) {
    for (uint64_t done = 0; done < slab.bytes;) {
        const uint64_t want = std::min(scratch_bytes, slab.bytes - done);
        const ssize_t got = pread(slab.fd, scratch, want, static_cast<off_t>(slab.offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return ENODATA;
        done += static_cast<uint64_t>(got);
    }
    return 0;
}

}  // namespace moestream
