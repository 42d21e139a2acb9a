#include "moestream/geometry.h"

#include <algorithm>

#include "moestream/error.h"

namespace moestream {

Geometry::Geometry(const SlabIndex& index)
    : index_(index), pages_(index.tensors().size(), UINT64_MAX), part_of_bank_(index.banks().size(), kNone),
      resident_(index.shards().size()) {
    std::vector<std::vector<Range>> movable(index.shards().size());
    for (uint32_t t = 0; t < index.tensors().size(); ++t) {
        const auto& tensor = index.tensors()[t];
        for (uint32_t id = 0; id < tensor.count; ++id) {
            const uint64_t first = movable_offset(t, id) / kPage;
            const uint64_t last = (index.slab_offset(t, id) + tensor.slab_bytes) / kPage;
            pages_[t] = std::min(pages_[t], last > first ? last - first : 0);
        }
        for (uint32_t id = 0; id < tensor.count && pages_[t] > 0; ++id) {
            const uint64_t begin = movable_offset(t, id);
            movable[tensor.shard].push_back({begin, begin + pages_[t] * kPage});
        }
    }
    for (uint32_t shard = 0; shard < movable.size(); ++shard) {
        std::sort(movable[shard].begin(), movable[shard].end(),
                  [](const Range& a, const Range& b) { return a.begin < b.begin; });
        uint64_t at = 0;
        for (const auto& range : movable[shard]) {
            if (range.begin > at) resident_[shard].push_back({at, range.begin});
            at = range.end;
        }
        const uint64_t bytes = index.shards()[shard].bytes;
        if (at < bytes) resident_[shard].push_back({at, bytes});
    }
    for (uint32_t b = 0; b < index.banks().size(); ++b) {
        Part part;
        if (index.banks()[b].tensors.size() > kSlots) throw Error(ErrorKind::usage, "a bank of over 4 tensors");
        for (const uint32_t t : index.banks()[b].tensors) {
            part.pages.push_back(static_cast<uint32_t>(pages_[t]));
            part.frame_pages += part.pages.back();
        }
        if (part.frame_pages == 0) continue;
        const auto same = std::find_if(parts_.begin(), parts_.end(),
                                       [&](const Part& other) { return other.pages == part.pages; });
        part_of_bank_[b] = static_cast<uint32_t>(same - parts_.begin());
        if (same == parts_.end()) parts_.push_back(part);
        parts_[part_of_bank_[b]].banks.push_back(b);
    }
}

}  // namespace moestream
