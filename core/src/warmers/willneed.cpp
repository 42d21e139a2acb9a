// willneed: madvise(MADV_WILLNEED) for each routed slab: the kernel reads ahead exactly it, in big requests.
#include "../stores/warmer.h"

namespace moestream {
namespace {

class WillNeed : public AdviceWarmer {
    int advise(const MappedSlab& slab) override { return advise_willneed(slab.address, slab.bytes); }
};

const WarmerRegistration registration("willneed", "madvise(MADV_WILLNEED) for each routed slab",
                                      [](const WarmerOptions& options, const std::string& argument) {
                                          expect_no_argument("willneed", argument);
                                          no_scratch("willneed", options);
                                          return std::make_unique<WillNeed>();
                                      });

}  // namespace
}  // namespace moestream
