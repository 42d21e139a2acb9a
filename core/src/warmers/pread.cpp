// pread: each routed slab is read into a scratch buffer, which leaves it in the page cache under the mapping.
// pread+willneed: advice for the slab first, so the kernel has the whole of it in flight while pread copies.
#include <array>
#include <memory>

#include "../stores/warmer.h"

namespace moestream {
namespace {

constexpr uint64_t kScratch = uint64_t{1} << 20;

class Pread : public Warmer {
  public:
    explicit Pread(bool advise) : advise_(advise), scratch_(std::make_unique<char[]>(kScratch)) {}
    int warm(const MappedSlab& slab) override {
        const int advised = advise_ ? advise_willneed(slab) : 0;
        return advised != 0 ? advised : read_through(slab, scratch_.get(), kScratch);
    }

  private:
    bool advise_;
    std::unique_ptr<char[]> scratch_;
};

const WarmerRegistration plain("pread", "pread of each routed slab into scratch, to warm the page cache",
                               [](const std::string&) { return std::make_unique<Pread>(false); });
const WarmerRegistration advised("pread+willneed", "MADV_WILLNEED, then pread of each routed slab into scratch",
                                 [](const std::string&) { return std::make_unique<Pread>(true); });

}  // namespace
}  // namespace moestream
