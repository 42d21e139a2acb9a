// What `cow` and `shared` have in common: a budgeted cache over a mapping that is written to. A miss is read into staging
// and copied into the mapping; a hit is left alone; an eviction only forgets, for the pages that were written stay.
//
// The mapping shows the file's own bytes wherever nothing was copied, so the text is right whatever the cache believes.
#pragma once
#include <memory>
#include <vector>

#include "shards.h"

namespace moestream {

class CopyingStore : public ShardedStore {
  public:
    CopyingStore(const SlabIndex& index, const StoreOptions& options);
    ~CopyingStore() override;

    void adopt(uint32_t shard, const Mapping& mapping) override;
    void load_dense() override;
    void set_capacities(std::span<const uint32_t> capacities) override;
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
    // Bytes of slabs that have been written at least once.
    uint64_t grown_bytes() const { return grown_; }

  private:
    static constexpr uint32_t kStaged = 16;  // slabs between disk and mapping at once
    struct Staging {
        char* data = nullptr;
        uint32_t tag = kNone;
    };
    uint32_t tag(uint32_t expert, uint32_t slot) const { return expert * kSlots + slot; }
    void make_staging();
    bool grow(std::span<const Load> loads, uint32_t bank);
    void submit(uint32_t expert, uint32_t slot);
    void reap();
    void copy(Staging& staging);

    std::unique_ptr<Reader> reader_;
    std::unique_ptr<ExpertCache> cache_;
    std::vector<Load> loads_;
    std::vector<RoutedExpert> routed_;
    uint32_t routed_bank_ = kNone;
    std::vector<bool> reading_;  // by tag
    std::vector<bool> written_;  // by tag, ever
    std::vector<Staging> staging_;
    std::vector<uint32_t> free_;  // of staging_
    char* staging_base_ = nullptr;
    uint64_t staging_bytes_ = 0;
    size_t in_flight_ = 0;
    uint64_t grown_ = 0, copied_ = 0;
};

}  // namespace moestream
