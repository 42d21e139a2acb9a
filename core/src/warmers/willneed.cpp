// willneed: madvise(MADV_WILLNEED) for each routed slab: the kernel reads ahead exactly it, in big requests.
#include "../stores/warmer.h"

namespace moestream {
namespace {

class WillNeed : public AdviceWarmer {
    int advise(const MappedSlab& slab) override { return advise_willneed(slab); }
};

const WarmerRegistration registration("willneed", "madvise(MADV_WILLNEED) for each routed slab",
                                      [](const WarmerOptions&, const std::string& argument) {
                                          no_argument("willneed", argument);
                                          return std::make_unique<WillNeed>();
                                      });

}  // namespace
}  // namespace moestream
