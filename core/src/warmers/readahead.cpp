// readahead: readahead(2) on the file for each routed slab. As `willneed`, but by descriptor and offset, and the call
// may block until the requests are queued.
#include <fcntl.h>

#include <cerrno>

#include "../stores/warmer.h"

namespace moestream {
namespace {

class ReadAhead : public AdviceWarmer {
    int advise(const MappedSlab& slab) override {
        return readahead(slab.fd, static_cast<off64_t>(slab.offset), slab.bytes) == 0 ? 0 : errno;
    }
};

const WarmerRegistration registration("readahead", "readahead(2) of each routed slab",
                                      [](const WarmerOptions& options, const std::string& argument) {
                                          expect_no_argument("readahead", argument);
                                          no_scratch("readahead", options);
                                          return std::make_unique<ReadAhead>();
                                      });

}  // namespace
}  // namespace moestream
