// fresh: an evicted slab's pages are dropped (MADV_DONTNEED), and the read faults in zeroed ones.
#include "fresh.h"

namespace moestream {
namespace {

const PageSourceRegistration registration("fresh", "an evicted expert's pages are dropped, the read faults in new ones",
                                          [](const PageSourceOptions&) { return std::make_unique<FreshPages>(); });

}  // namespace
}  // namespace moestream
