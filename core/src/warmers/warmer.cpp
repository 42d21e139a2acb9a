#include "../stores/warmer.h"

#include <sys/mman.h>

#include <cerrno>

namespace moestream {

void no_argument(const char* name, const std::string& argument) {
    if (!argument.empty()) {
        throw Error(ErrorKind::usage, std::string(name) + " takes no argument, not '" + argument + "'");
    }
}

Pages around(const char* address, uint64_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(address) / kPage * kPage;
    return {reinterpret_cast<char*>(start), reinterpret_cast<uintptr_t>(address) + bytes - start};
}

Warmer::Outcome AdviceWarmer::warm(std::span<const MappedSlab> slabs) {
    Outcome outcome;
    for (size_t i = 0; i < slabs.size(); ++i) {
        ++calls_;
        outcome.bytes += slabs[i].bytes;
        const int error = advise(slabs[i]);
        if (error != 0) return {error, i, outcome.bytes};
    }
    return outcome;
}

int advise_willneed(const MappedSlab& slab) {
    const Pages pages = around(slab.address, slab.bytes);
    return madvise(pages.begin, pages.bytes, MADV_WILLNEED) == 0 ? 0 : errno;
}

}  // namespace moestream
