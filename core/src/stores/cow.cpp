// cow: the file in a private mapping that may be written. Every slab that is loaded is copied into it, which gives the
// process a page of its own for each page of the file it ever copied: resident memory grows until a copy of every
// expert that was ever used is there, whatever the budget says. It is here to show that, inside a cap.
#include <sys/mman.h>

#include "copying.h"

namespace moestream {
namespace {

class CowStore : public CopyingStore {
  public:
    using CopyingStore::CopyingStore;

  private:
    int mapping_kind() const override { return MAP_PRIVATE; }
    int mapped_fd(uint32_t shard) const override { return regions_[shard].buffered_fd; }
};

const StoreRegistration registration(
    "cow", "reads copied into a private mapping of the file: every page written once stays",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<CowStore>(index, options);
    });

}  // namespace
}  // namespace moestream
