#include "../stores/page_source.h"

#include <sys/mman.h>

#include <cerrno>

namespace moestream {

int PageSource::drop(char* at, size_t bytes) {
    if (madvise(at, bytes, MADV_DONTNEED) != 0) return errno;
    dropped_ += bytes;
    return 0;
}

std::map<std::string, uint64_t> PageSource::counts() const {
    return {{"bytes moved", moved_}, {"bytes dropped", dropped_}, {"bytes populated", populated_}};
}

std::unique_ptr<PageSource> make_page_source(const std::string& text, const PageSourceOptions& options) {
    std::string argument;
    return Registry<PageSourceFactory>::instance().find(text, argument)(options);
}

}  // namespace moestream
