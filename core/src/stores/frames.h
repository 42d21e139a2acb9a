// An arena's frames: the pages of its budget, which expert has them, and how they get from one expert to the next. Knows
// of no read and no policy: whoever moves a frame sees to it that nothing is being read into it.
#pragma once
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "moestream/geometry.h"
#include "moestream/store.h"
#include "page_source.h"

namespace moestream {

class Frames {
  public:
    // All three are kept by reference. Throws what making a page source throws.
    Frames(const SlabIndex& index, const Geometry& geometry, const StoreOptions& options);

    // A shard's region has been reserved.
    void region(char* base, uint32_t shard) { source_->region(base, shard); }
    // So many of each part, all free. Throws Error(refused) where that takes more mappings than a process may have.
    void set_capacities(std::span<const uint32_t> capacities);

    // Whose frame an expert's is from now on: a free one of its part (there must be one), or `victim`'s. Its pages
    // follow slab by slab, with `supply`.
    void take(uint32_t expert);
    void take_from(uint32_t victim, uint32_t expert);
    // Gives the slab at `to` its pages: those at `left`, the victim's slab, or (null) the frame's own. 0 or errno.
    int supply(uint32_t expert, uint32_t slot, char* left, char* to);
    // Lets the slab at `at` be read into, where what has no pages is closed. 0 or errno.
    int open(uint32_t expert, uint32_t slot, char* at);
    // Maps what moves that failed have left without a mapping. 0, or errno where something is not ours still: nothing
    // is to be read into it then, nor computed on it. EEXIST is for good: somebody else has mapped it meanwhile.
    int mend();

    // Gives the pages at `at` back to the system. 0 or errno.
    int drop(char* at, size_t bytes);
    // An expert's pages have all been dropped: it has no frame.
    void vacate(uint32_t expert) { place_[expert] = nullptr; }
    // Free frames without pages, the next to be taken; and after all others.
    void put_back(uint32_t part) { free_[part].push_back(nullptr); }
    void add(uint32_t part, size_t count) { free_[part].insert(free_[part].begin(), count, nullptr); }
    // Drops `count` free frames. 0 or errno.
    int remove(uint32_t part, size_t count);

    std::map<std::string, uint64_t> counts() const { return source_->counts(); }

  private:
    const Geometry::Part& part_of(uint32_t expert) const {
        return geometry_.parts()[geometry_.part_of_bank(index_.bank_of(expert))];
    }
    void map_at_once(char* at, size_t bytes);
    bool is_hole(const char* at) const;
    void count_mappings(std::span<const uint32_t> capacities);

    const SlabIndex& index_;
    const Geometry& geometry_;
    const StoreOptions& options_;
    std::unique_ptr<PageSource> source_;
    std::vector<std::vector<char*>> free_;  // a part: where the pages of frames without an expert lie, or null
    std::vector<char*> place_;              // an expert: where its first load takes pages from, or null
    std::vector<std::pair<char*, size_t>> holes_;  // where moves that failed were to go, and nothing is mapped
    bool taken_ = false;                    // of the holes one is somebody else's by now
    bool restore_ = false;                  // vacated ranges are mapped again, so that they merge
};

}  // namespace moestream
