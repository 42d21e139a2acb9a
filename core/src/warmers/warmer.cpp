#include "../stores/warmer.h"

#include <sys/mman.h>

#include <cerrno>

namespace moestream {

void no_scratch(const char* name, const WarmerOptions& options) {
    if (options.huge || options.alignment != kPage) {
        throw Error(ErrorKind::refused, std::string(name) + " reads into no memory of its own: leave out " +
                                            (options.huge ? "huge" : "the alignment") + ", or use pread");
    }
}

Pages around(const char* address, uint64_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(address) / kPage * kPage;
    return {reinterpret_cast<char*>(start), reinterpret_cast<uintptr_t>(address) + bytes - start};
}

Warmer::Trouble AdviceWarmer::warm(std::span<MappedSlab> slabs) {
    for (auto& slab : slabs) {
        const int error = advise(slab);
        if (error != 0) return {error, slab};
        ++calls_;
        slab.asked = slab.bytes;
    }
    return {};
}

int advise_willneed(const char* address, uint64_t bytes) {
    const Pages pages = around(address, bytes);
    return madvise(pages.begin, pages.bytes, MADV_WILLNEED) == 0 ? 0 : errno;
}

}  // namespace moestream
