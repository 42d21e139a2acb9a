#include "moestream/slab_index.h"

#include <algorithm>
#include <numeric>

#include "moestream/error.h"

namespace moestream {

[[noreturn]] static void refuse(const ExpertTensor& tensor, const std::string& what) {
    throw Error(ErrorKind::usage, "slab index: " + tensor.name + " " + what);
}

static void validate(const ExpertTensor& tensor, const std::vector<Shard>& shards, size_t banks) {
    if (tensor.bank >= banks) refuse(tensor, "names bank " + std::to_string(tensor.bank) + ", which has no layer");
    if (tensor.shard >= shards.size()) refuse(tensor, "names shard " + std::to_string(tensor.shard) + " of none");
    if (tensor.count == 0 || tensor.slab_bytes == 0) refuse(tensor, "has no bytes");
    const Shard& shard = shards[tensor.shard];
    // Divided, not multiplied: sizes come from a file and their product may overflow.
    if (tensor.offset > shard.bytes || (shard.bytes - tensor.offset) / tensor.slab_bytes < tensor.count)
        refuse(tensor, "leaves its shard " + shard.path + " of " + std::to_string(shard.bytes) + " bytes");
}

SlabIndex::SlabIndex(std::vector<Shard> shards, std::vector<ExpertTensor> tensors, std::vector<int32_t> layers)
    : shards_(std::move(shards)), tensors_(std::move(tensors)), banks_(layers.size()) {
    for (uint32_t t = 0; t < tensors_.size(); ++t) {
        const ExpertTensor& tensor = tensors_[t];
        validate(tensor, shards_, banks_.size());
        Bank& bank = banks_[tensor.bank];
        if (bank.tensors.empty()) bank.count = tensor.count;
        if (bank.count != tensor.count)
            refuse(tensor, "has " + std::to_string(tensor.count) + " experts where its bank has " +
                               std::to_string(bank.count));
        bank.tensors.push_back(t);
    }
    uint64_t experts = 0;
    for (uint32_t b = 0; b < banks_.size(); ++b) {
        Bank& bank = banks_[b];
        if (bank.tensors.empty())
            throw Error(ErrorKind::usage, "slab index: bank " + std::to_string(b) + " has no tensors");
        bank.layer = layers[b];
        bank.first_expert = static_cast<uint32_t>(experts);
        experts += bank.count;
        if (experts >= kNone) throw Error(ErrorKind::usage, "slab index: too many experts to number");
        bank_of_.resize(experts, b);
    }
    experts_ = static_cast<uint32_t>(experts);

    by_offset_.resize(tensors_.size());
    std::iota(by_offset_.begin(), by_offset_.end(), 0u);
    std::sort(by_offset_.begin(), by_offset_.end(), [this](uint32_t a, uint32_t b) {
        const ExpertTensor &x = tensors_[a], &y = tensors_[b];
        return x.shard != y.shard ? x.shard < y.shard : x.offset < y.offset;
    });
    for (size_t i = 1; i < by_offset_.size(); ++i) {
        const ExpertTensor &x = tensors_[by_offset_[i - 1]], &y = tensors_[by_offset_[i]];
        if (x.shard == y.shard && x.offset + x.count * x.slab_bytes > y.offset) refuse(y, "overlaps " + x.name);
    }
}

uint32_t SlabIndex::tensor_at(uint32_t shard, uint64_t offset) const {
    const auto starts_later = [this, shard](uint64_t value, uint32_t t) {
        const ExpertTensor& tensor = tensors_[t];
        return tensor.shard != shard ? tensor.shard > shard : tensor.offset > value;
    };
    const auto after = std::upper_bound(by_offset_.begin(), by_offset_.end(), offset, starts_later);
    if (after == by_offset_.begin()) return kNone;
    const ExpertTensor& tensor = tensors_[*(after - 1)];
    const bool inside = tensor.shard == shard && offset - tensor.offset < tensor.count * tensor.slab_bytes;
    return inside ? *(after - 1) : kNone;
}

}  // namespace moestream
