// populate: as fresh, but the new pages are had by one MADV_POPULATE_WRITE before the read.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "fresh.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace moestream {
namespace {

class Populate : public FreshPages {
  public:
    Populate() {
        void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        const bool works = page != MAP_FAILED && madvise(page, kPage, MADV_POPULATE_WRITE) == 0;
        const int error = errno;
        if (page != MAP_FAILED) munmap(page, kPage);
        if (!works) {
            throw Error(ErrorKind::refused, std::string("arena/populate: MADV_POPULATE_WRITE is refused (") +
                                              std::strerror(error) + "): Linux 5.14 or newer has it");
        }
    }
    int supply(char* from, char* to, size_t bytes, bool restore) override {
        const int error = FreshPages::supply(from, to, bytes, restore);
        if (error != 0) return error;
        populated_ += bytes;
        return madvise(to, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    }
};

const PageSourceRegistration registration("populate", "as fresh, populated before the read",
                                          [](const PageSourceOptions&) { return std::make_unique<Populate>(); });

}  // namespace
}  // namespace moestream
