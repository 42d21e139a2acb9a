// What `cow` and `shared` have in common: a budgeted cache over a mapping that is written to. A miss is read into staging
// and copied into the mapping; a hit is left alone; an eviction only forgets, for the pages that were written stay.
//
// The mapping shows the file's own bytes wherever nothing was copied, so the text is right whatever the cache believes.
#pragma once
#include <memory>
#include <vector>

#include "buffers.h"
#include "shards.h"

namespace moestream {

class CopyingStore : public ShardedStore {
  public:
    CopyingStore(const SlabIndex& index, const StoreOptions& options);

    void* region(uint32_t shard) override;
    void adopt(uint32_t shard, const Mapping& mapping) override;
    void load_dense() override;
    void set_capacities(std::span<const uint32_t> capacities) override;
    void limit_growth(uint64_t bytes) override { growth_limit_ = bytes; }
    bool streams() const override { return !geometry_.parts().empty(); }
    bool route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) override;
    bool pending(uint32_t tensor) const override;
    bool wait(uint32_t tensor) override;
    void speculate(std::span<const uint32_t>) override {}
    bool demand_idle() const override { return in_flight_ == 0; }
    StoreCounters counters() const override;
    std::map<std::string, uint64_t> engagement() const override;
    void clear_failure() override;

  protected:
    // How the mapping is made: MAP_PRIVATE or MAP_SHARED, and of which file.
    virtual int mapping_kind() const = 0;
    virtual int mapped_fd(uint32_t shard) const = 0;

  private:
    uint32_t tag(uint32_t expert, uint32_t slot) const { return expert * kSlots + slot; }
    uint32_t slot_of(uint32_t tensor) const;
    void map(uint32_t shard, void* at, uint64_t begin, uint64_t end);
    bool may_grow(uint32_t bank, std::span<const RoutedExpert> experts);
    void submit(uint32_t expert, uint32_t slot);
    bool load(uint32_t bank);
    void sleep();
    void reap();
    void copy(uint32_t place);

    std::unique_ptr<Buffers> staging_;  // a place a slab between disk and mapping; outlives the reader
    std::unique_ptr<Reader> reader_;
    std::unique_ptr<ExpertCache> cache_;
    std::vector<Load> loads_;
    std::vector<RoutedExpert> routed_;
    uint32_t routed_bank_ = kNone;
    std::vector<bool> reading_;     // by tag
    std::vector<bool> there_;       // by tag: copied since the cache last took it in
    std::vector<bool> written_;     // by tag, ever
    std::vector<uint32_t> tag_at_;  // of staging: whose slab is on its way there
    std::vector<uint32_t> free_;    // places of staging
    size_t in_flight_ = 0;
    uint64_t copied_ = 0, copy_ns_ = 0;
    uint64_t grown_ = 0;         // bytes of slabs that have been written at least once
    uint64_t growth_limit_ = 0;  // most of them; 0: no limit
};

}  // namespace moestream
