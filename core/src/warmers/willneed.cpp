// willneed: madvise(MADV_WILLNEED) for each routed slab: the kernel reads ahead exactly it, in big requests.
#include "../stores/warmer.h"

namespace moestream {
namespace {

struct WillNeed : Warmer {
    int warm(const MappedSlab& slab) override { return advise_willneed(slab); }
};

const WarmerRegistration registration("willneed", "madvise(MADV_WILLNEED) for each routed slab",
                                      [](const std::string&) { return std::make_unique<WillNeed>(); });

}  // namespace
}  // namespace moestream
