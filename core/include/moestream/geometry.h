// Which pages of a slab can move. Pages that a slab shares with a neighbour or with dense bytes never move: they are
// read at load and stay. Of the whole pages inside a slab, every slab of a tensor has the same number movable (the
// fewest any of them has), so that the pages of one expert fit another of its part exactly.
#pragma once
#include <cstdint>
#include <vector>

#include "moestream/slab_index.h"

namespace moestream {

inline constexpr uint32_t kSlots = 4;  // most tensors a bank can have

class Geometry {
  public:
    struct Range {
        uint64_t begin = 0;
        uint64_t end = 0;
    };
    struct Part {
        std::vector<uint32_t> banks;
        std::vector<uint32_t> pages;  // movable pages a slab, by slot (the tensor's place in its bank)
        uint32_t frame_pages = 0;     // their sum: one expert
    };
    explicit Geometry(const SlabIndex& index);

    uint64_t movable_offset(uint32_t tensor, uint32_t id) const {
        return (index_.slab_offset(tensor, id) + kPage - 1) / kPage * kPage;
    }
    uint64_t movable_bytes(uint32_t tensor) const { return pages_[tensor] * kPage; }
    // Parts with frames of at least one page, in the order of their first bank.
    const std::vector<Part>& parts() const { return parts_; }
    uint32_t part_of_bank(uint32_t bank) const { return part_of_bank_[bank]; }
    // The complement of all movable ranges in a shard, ascending, not merged over gaps, cut to the shard's length.
    const std::vector<Range>& resident(uint32_t shard) const { return resident_[shard]; }

  private:
    const SlabIndex& index_;
    std::vector<uint64_t> pages_;
    std::vector<Part> parts_;
    std::vector<uint32_t> part_of_bank_;
    std::vector<std::vector<Range>> resident_;
};

}  // namespace moestream
