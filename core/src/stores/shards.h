// What all stores share: the shards' descriptors, their regions, and finding a tensor by its address.
#pragma once
#include <sys/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "moestream/fault_guard.h"
#include "moestream/geometry.h"
#include "moestream/store.h"

namespace moestream {

class ShardedStore : public Store {
  public:
    ShardedStore(const SlabIndex& index, StoreOptions options);
    ~ShardedStore() override;
    ShardedStore(const ShardedStore&) = delete;
    ShardedStore& operator=(const ShardedStore&) = delete;

    Place place(const void* address) const override;
    void begin_step() override;
    const std::optional<Failure>& failure() const override;
    void clear_failure() override { failure_.reset(); }

  protected:
    struct Region {
        char* base = nullptr;
        uint64_t bytes = 0;   // of the file
        uint64_t begin = 0;   // what of the file is in the region: all of it, unless llama.cpp mapped it
        uint64_t end = 0;
        int fd = -1;          // as the mechanism reads slabs: O_DIRECT or buffered
        int buffered_fd = -1;
        bool foreign = false;  // llama.cpp's own mapping, which it unmaps itself
        bool loaded = false;
        bool locked = false;
        std::unique_ptr<FaultWatch> watch;  // of a file mapping: its pages can fail after any check
    };
    char* slab_page(uint32_t tensor, uint32_t id) const {
        return regions_[index_.tensors()[tensor].shard].base + geometry_.movable_offset(tensor, id);
    }
    // Reads [begin, end) of a shard into its region: whole pages by `reader`, the file's last partial page buffered.
    // Called for many ranges of one shard; `drain` finishes them. Throws Error(io).
    void read_range(Reader& reader, uint32_t shard, Geometry::Range range);
    void drain(Reader& reader, uint32_t shard, size_t down_to);
    // Everything that is not movable, of the shards mapped since the last call, into memory that is already reserved; with
    // the option `closed` it is opened first.
    void read_resident(Reader& reader);
    // mlock of what `to_lock` names, of the shards mapped since the last call, as far as a limit goes; what is refused is
    // a named fallback.
    void lock_resident();
    virtual std::vector<Geometry::Range> to_lock(uint32_t shard) const { return resident(shard); }
    // The same of a file mapping, asked for by name first so that no fault reads ahead into slabs. Throws
    // Error(refused) where the kernel takes no advice.
    void lock_exactly();
    // The cache of the movable experts, so many of each part.
    std::unique_ptr<ExpertCache> make_expert_cache(std::span<const uint32_t> capacities) const;
    void fail(int error, std::string what);
    // A route that is wider than its part's budget.
    void refuse_width(const ExpertCache& cache, uint32_t bank, size_t experts);
    void fail_read(uint32_t expert, uint32_t slot, const Completion& completion);
    // A buffered read leaves its bytes in the page cache too, where they would only take memory from experts: they are
    // dropped, but for slabs with `keep_cached`.
    // What the kernel refuses to drop is a failure; of the load, an Error(refused).
    void forget_cached(uint32_t tensor, uint32_t id);
    void forget_load(uint32_t shard) const;
    // Advice that the mechanism promises: `error` is what the call came to. Throws Error(refused) but for 0.
    void require_advice(uint32_t shard, const char* advice, int error) const;
    void open_shards(bool direct);
    // The shard's ranges that never move, within what is mapped of it.
    std::vector<Geometry::Range> resident(uint32_t shard) const;
    // The shard's region is a mapping of its file, or of a copy of it.
    void watch(uint32_t shard);
    // Uses llama.cpp's mapping as the region; `overlay` also puts memory of our own in its place.
    void use(uint32_t shard, const Mapping& mapping);
    void overlay(uint32_t shard, const Mapping& mapping);

    Geometry geometry_;
    StoreOptions options_;
    std::vector<Region> regions_;
    StoreCounters counters_;
    mutable std::optional<Failure> failure_;  // a fault is noted when it is asked for

  private:
    Failure lost_page(uint32_t shard, uint64_t offset) const;
    // Why a page of a mapping cannot be had, as an errno, and what is to be done, in words.
    virtual std::pair<int, std::string> why_lost(uint32_t shard, uint64_t offset) const;
    void read_tail(uint32_t shard, uint64_t begin, uint64_t end);
    uint32_t next_tag_ = 0;
    uint64_t load_total_ = 0;
};

}  // namespace moestream
