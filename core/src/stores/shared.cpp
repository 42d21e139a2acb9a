// shared: write in place. The mapping is shared and writable, and of a *copy* of the file that is made at load and has no
// name by the time it is used, so that nothing remains of it whatever happens. The user's file is only ever read. Every
// page that is written becomes dirty, and the kernel writes it back to the copy: that is what this store is here to show.
#include <sys/mman.h>

#include <cerrno>

#include "copying.h"
#include "file_copy.h"

namespace moestream {
namespace {

class SharedStore : public CopyingStore {
  public:
    SharedStore(const SlabIndex& index, const StoreOptions& options) : CopyingStore(index, options) {
        uint64_t total = 0, done = 0;
        for (const auto& region : regions_) total += region.bytes;
        // For all shards before the first, and for a reflink too: each page that is written becomes a block of its own.
        require_room(options.copy_dir, total);
        for (uint32_t s = 0; s < regions_.size(); ++s) {
            copies_.emplace_back(regions_[s].buffered_fd, regions_[s].bytes, index.shards()[s].path, options.copy_dir,
                                 [&](uint64_t bytes) {
                                     if (options.progress) options.progress(done + bytes, total);
                                 });
            done += regions_[s].bytes;
        }
    }
    std::map<std::string, uint64_t> engagement() const override {
        auto counts = CopyingStore::engagement();
        for (const auto& copy : copies_) {
            counts["bytes of the file's copy"] += copy.bytes();
            counts["reflinks"] += copy.reflinked() ? 1 : 0;
        }
        return counts;
    }

  private:
    int mapping_kind() const override { return MAP_SHARED; }
    int mapped_fd(uint32_t shard) const override { return copies_[shard].fd(); }
    // The file is whole: a page of its copy has failed. One of a reflink needs room of its own at its first write.
    std::pair<int, std::string> why_lost(uint32_t, uint64_t) const override {
        return {EIO, "the page of its copy can be neither written nor read, the disk of " + options_.copy_dir +
                         " is full or fails" + kElsewhere + ", then load the model again"};
    }

    std::vector<FileCopy> copies_;  // by shard
};

const StoreRegistration registration(
    "shared", "reads written into a shared mapping of a copy of the file",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<SharedStore>(index, options);
    });

}  // namespace
}  // namespace moestream
