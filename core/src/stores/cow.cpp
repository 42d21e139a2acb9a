// cow: the file in a private mapping that may be written. Every slab that is loaded is copied into it, which gives the
// process a page of its own for each page of the file it ever copied: resident memory grows until the whole of the experts
// is there twice (here and in the page cache), whatever the budget says. It is here to show that, inside a cap.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "copying.h"
#include "moestream/interpose.h"

namespace moestream {
namespace {

class CowStore : public CopyingStore {
  public:
    using CopyingStore::CopyingStore;

    void* region(uint32_t shard) override {
        auto& region = regions_[shard];
        if (region.base != nullptr) return region.base;
        // NORESERVE: it will never be written as a whole, and must not be charged as if.
        void* base = mmap(nullptr, region.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                          region.buffered_fd, 0);
        if (base == MAP_FAILED) {
            const int error = errno;
            fail(error, index_.shards()[shard].path + " cannot be mapped privately (" + std::strerror(error) + ")");
            return MAP_FAILED;
        }
        region.base = static_cast<char*>(base);
        register_region(region.base, region.bytes);
        return base;
    }
};

const StoreRegistration registration(
    "cow", "reads copied into a private mapping of the file: every page written once stays",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<CowStore>(index, options);
    });

}  // namespace
}  // namespace moestream
