// Where every expert's bytes are, as plain numbers: the core never parses a GGUF, it is handed this table.
//
// Words. A *bank* is one set of experts that one routing decision chooses from: the routed experts of one layer (or
// the chunk experts of one layer, which some architectures have beside them). An *expert* is (bank, id); its global
// number is bank.first_expert + id. A *slab* is one expert's bytes in one expert tensor of its bank. An expert
// owns one slab for each tensor of its bank, in the bank's tensor order: the order the matmuls use them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace moestream {

inline constexpr uint32_t kNone = UINT32_MAX;
inline constexpr uint64_t kPage = 4096;

struct Shard {
    std::string path;
    uint64_t bytes = 0;
};

struct ExpertTensor {
    std::string name;
    uint32_t bank = 0;
    uint32_t shard = 0;
    uint64_t offset = 0;      // of slab 0, from the start of the shard's file
    uint64_t slab_bytes = 0;  // slab e starts at offset + e * slab_bytes
    uint32_t count = 0;       // experts
};

struct Bank {
    int32_t layer = 0;
    uint32_t count = 0;  // experts
    uint32_t first_expert = 0;
    std::vector<uint32_t> tensors;  // indices into SlabIndex::tensors
};

class SlabIndex {
  public:
    // Banks are numbered 0..n-1 by ExpertTensor::bank; `layers[b]` is bank b's layer. Throws Error(usage) when the
    // tensors of a bank disagree on `count`, a tensor leaves its shard or two tensors overlap.
    SlabIndex(std::vector<Shard> shards, std::vector<ExpertTensor> tensors, std::vector<int32_t> layers);

    const std::vector<Shard>& shards() const { return shards_; }
    const std::vector<ExpertTensor>& tensors() const { return tensors_; }
    const std::vector<Bank>& banks() const { return banks_; }
    uint32_t experts() const { return experts_; }
    uint32_t bank_of(uint32_t expert) const { return bank_of_[expert]; }
    uint32_t id_of(uint32_t expert) const { return expert - banks_[bank_of_[expert]].first_expert; }
    // The tensor that covers a byte of a shard, or kNone.
    uint32_t tensor_at(uint32_t shard, uint64_t offset) const;
    uint64_t slab_offset(uint32_t tensor, uint32_t id) const {
        return tensors_[tensor].offset + id * tensors_[tensor].slab_bytes;
    }

  private:
    std::vector<Shard> shards_;
    std::vector<ExpertTensor> tensors_;
    std::vector<Bank> banks_;
    std::vector<uint32_t> bank_of_;
    std::vector<uint32_t> by_offset_;  // tensor indices ordered by (shard, offset)
    uint32_t experts_ = 0;
};

}  // namespace moestream
