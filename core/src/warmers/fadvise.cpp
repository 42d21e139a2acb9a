// fadvise: posix_fadvise(POSIX_FADV_WILLNEED) on the file for each routed slab.
#include <fcntl.h>

#include "../stores/warmer.h"

namespace moestream {
namespace {

class FileAdvice : public AdviceWarmer {
    int advise(const MappedSlab& slab) override {
        const auto offset = static_cast<off_t>(slab.offset);
        return posix_fadvise(slab.fd, offset, static_cast<off_t>(slab.bytes), POSIX_FADV_WILLNEED);
    }
};

const WarmerRegistration registration("fadvise", "posix_fadvise(POSIX_FADV_WILLNEED) for each routed slab",
                                      [](const WarmerOptions& options, const std::string& argument) {
                                          expect_no_argument("fadvise", argument);
                                          no_scratch("fadvise", options);
                                          return std::make_unique<FileAdvice>();
                                      });

}  // namespace
}  // namespace moestream
