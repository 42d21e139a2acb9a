// populate: as fresh, but the new pages are had by one MADV_POPULATE_WRITE before the read.
#include <sys/mman.h>

#include <cerrno>

#include "../stores/pages.h"
#include "fresh.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace moestream {
namespace {

class Populate : public FreshPages {
  public:
    Populate() {
        if (const std::string why = populate_refused(); !why.empty()) {
            throw Error(ErrorKind::refused, "arena/populate: " + why);
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
