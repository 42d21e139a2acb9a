// resident: the whole model in memory of our own, read once at load in big requests: the compute ceiling.
//
// Nothing happens at a route, so the graph is not cut and llama.cpp computes as if it were alone. Anonymous memory
// in huge pages instead of the page cache: it cannot be reclaimed under the model.
#include <sys/mman.h>

#include <memory>

#include "moestream/interpose.h"
#include "pages.h"
#include "shards.h"

namespace moestream {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

class ResidentStore : public ShardedStore {
  public:
    ResidentStore(const SlabIndex& index, const StoreOptions& options)
        : ShardedStore(index, options), reader_(make_reader(options.reader, ReaderOptions{})) {
        if (options_.dense == "mapped") {
            throw Error(ErrorKind::usage, "a resident model is in memory of its own: use dense anon or mlock");
        }
        open_shards(options_.direct);
    }
    void* region(uint32_t shard) override {
        auto& region = regions_[shard];
        if (region.base == nullptr) {
            region.base = reserve(region.bytes, kHuge);
            madvise(region.base, region.bytes, MADV_HUGEPAGE);
            register_region(region.base, region.bytes);
        }
        return region.base;
    }
    void adopt(uint32_t shard, const Mapping& mapping) override { overlay(shard, mapping); }
    void load_dense() override {
        for (uint32_t s = 0; s < regions_.size(); ++s) {
            auto& region = regions_[s];
            if (region.base == nullptr || region.loaded) continue;
            read_range(*reader_, s, {region.begin, region.end});
            drain(*reader_, s, 0);
            region.loaded = true;
        }
        if (options_.dense == "mlock") lock_resident();
    }
    void set_capacities(std::span<const uint32_t>) override {}
    bool streams() const override { return false; }
    bool route(uint32_t, std::span<const RoutedExpert> experts, uint64_t, uint32_t) override {
        counters_.hits += experts.size();
        return true;
    }
    bool pending(uint32_t) const override { return false; }
    bool wait(uint32_t) override { return true; }
    void speculate(std::span<const uint32_t>) override {}
    bool demand_idle() const override { return true; }
    StoreCounters counters() const override { return counters_; }

  private:
    std::vector<Geometry::Range> to_lock(uint32_t shard) const override {
        return {{regions_[shard].begin, regions_[shard].end}};
    }

    std::unique_ptr<Reader> reader_;
};

const StoreRegistration registration(
    "resident", "all in memory, read once at load: the compute ceiling",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<ResidentStore>(index, options);
    });

}  // namespace
}  // namespace moestream
