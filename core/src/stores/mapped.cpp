// mapped: the file mapping without MAP_POPULATE; the kernel's page cache is the cache. What is done at a route is
// the warmer's business (warmer.h).
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "moestream/interpose.h"
#include "pages.h"
#include "shards.h"
#include "warmer.h"

namespace moestream {
namespace {

class MappedStore : public ShardedStore {
  public:
    MappedStore(const SlabIndex& index, const StoreOptions& options) : ShardedStore(index, options) {
        std::string argument;
        warmer_ = Registry<WarmerFactory>::instance().find(options_.reader, argument)(argument);
        idle_ = options_.reader == "fault";
        open_shards(false);
    }

    void* region(uint32_t shard) override {
        auto& region = regions_[shard];
        if (region.base != nullptr) return region.base;
        void* base = mmap(nullptr, region.bytes, PROT_READ, MAP_SHARED, region.buffered_fd, 0);
        if (base == MAP_FAILED) {
            const int error = errno;
            fail(error, index_.shards()[shard].path + " cannot be mapped (" + std::strerror(error) +
                            "): use the arena store");
            return MAP_FAILED;
        }
        region.base = static_cast<char*>(base);
        register_region(region.base, region.bytes);
        return base;
    }
    void adopt(uint32_t shard, const Mapping& mapping) override { use(shard, mapping); }
    void load_dense() override {
        if (options_.dense == "anon") copy_resident();
        if (options_.dense == "mlock") lock_exactly();
    }
    void set_capacities(std::span<const uint32_t>) override {}
    bool streams() const override { return !idle_; }

    bool route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t, uint32_t) override {
        const uint64_t start = now_ns();
        for (const uint32_t t : index_.banks()[bank].tensors) {
            const auto& tensor = index_.tensors()[t];
            const auto& region = regions_[tensor.shard];
            for (const auto& routed : experts) {
                const uint64_t offset = index_.slab_offset(t, index_.id_of(routed.expert));
                const int error = warmer_->warm({region.base + offset, region.buffered_fd, offset, tensor.slab_bytes});
                counters_.bytes += tensor.slab_bytes;
                if (error == 0) continue;
                fail(error, index_.shards()[tensor.shard].path + " at byte " + std::to_string(offset) + " (" +
                                tensor.name + "): " + (error == ENODATA ? "the file ends early" : std::strerror(error)));
                return false;
            }
        }
        counters_.memory_ns += now_ns() - start;
        return true;
    }
    bool pending(uint32_t) const override { return false; }
    bool wait(uint32_t) override { return !failure_; }
    void speculate(std::span<const uint32_t>) override {}
    bool demand_idle() const override { return true; }
    StoreCounters counters() const override { return counters_; }

  private:
    // Locking faults pages in, and each fault would read ahead (by megabytes, on some boxes) into slabs that are not
    // wanted: enough to fill a cgroup faster than it reclaims. So the ranges are asked for by name first.
    void lock_exactly() {
        for (uint32_t s = 0; s < regions_.size(); ++s) {
            const auto& region = regions_[s];
            if (region.base == nullptr || region.locked) continue;
            madvise(region.base + region.begin, region.end - region.begin, MADV_RANDOM);
            for (const auto& range : resident(s)) {
                advise_willneed({region.base + range.begin, region.buffered_fd, range.begin, range.end - range.begin});
                counters_.dense_bytes += range.end - range.begin;
            }
        }
        lock_resident();
        for (const auto& region : regions_) {
            if (region.base != nullptr) madvise(region.base + region.begin, region.end - region.begin, MADV_NORMAL);
        }
    }

    // Dense bytes in memory of our own at the same addresses; the slabs' movable pages stay file mappings.
    void copy_resident() {
        for (uint32_t s = 0; s < regions_.size(); ++s) {
            if (regions_[s].base == nullptr || regions_[s].loaded) continue;
            for (const auto& range : resident(s)) {
                reserve(range.end - range.begin, kPage, regions_[s].base + range.begin);
            }
        }
        const auto reader = make_reader("sync", ReaderOptions{});
        read_resident(*reader);
    }

    std::unique_ptr<Warmer> warmer_;
    bool idle_ = false;
};

const StoreRegistration registration(
    "mapped", "the file mapping without MAP_POPULATE; the page cache is the cache",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<MappedStore>(index, options);
    });

}  // namespace
}  // namespace moestream
