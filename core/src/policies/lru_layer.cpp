// lru-layer: LRU inside equal shares. Layers are used in a cycle, so under a budget smaller than one token's demand
// a global LRU throws out exactly what comes next and hits nothing; a share a bank keeps hits in every layer.
//
// Each bank has a quota of capacity / banks experts (the remainder goes to the first banks). The victim is, in this
// order: the oldest candidate of the incoming expert's own bank, if that bank holds at least its quota; the oldest
// candidate of the bank furthest above its quota (ties to the lower bank); the oldest candidate of all.
#include "candidates.h"
#include "indexed_heap.h"
#include "recency_lists.h"

namespace moestream {
namespace {

class LruLayer final : public CandidatePolicy {
  public:
    explicit LruLayer(const PolicyShape& shape)
        : CandidatePolicy(shape.experts),
          bank_of_(shape.bank_of),
          excess_(shape.banks),
          by_bank_(shape.experts, shape.banks),
          all_(shape.experts, 1),
          richest_(shape.banks, Richer{&excess_}) {
        const uint32_t share = shape.capacity / shape.banks, remainder = shape.capacity % shape.banks;
        for (uint32_t bank = 0; bank < shape.banks; ++bank) excess_[bank] = -int64_t{share + (bank < remainder)};
    }
    LruLayer(const LruLayer&) = delete;  // the heap points at excess_
    LruLayer& operator=(const LruLayer&) = delete;

    void use(uint32_t expert, const Use&) override {
        ++clock_;
        if (candidate(expert)) {
            by_bank_.touch(bank_of_[expert], expert, clock_);
            all_.touch(0, expert, clock_);
        } else {
            by_bank_.stamp[expert] = all_.stamp[expert] = clock_;
        }
    }
    void admit(uint32_t expert) override {
        hold(bank_of_[expert], 1);
        CandidatePolicy::admit(expert);
    }
    void forget(uint32_t expert) override {
        hold(bank_of_[expert], -1);
        CandidatePolicy::forget(expert);
    }
    uint32_t victim(uint32_t incoming) override {
        const uint32_t own = bank_of_[incoming];
        if (excess_[own] >= 0 && !by_bank_.empty(own)) return by_bank_.oldest(own);
        const uint32_t richest = richest_.top();
        if (richest != kNone && excess_[richest] > 0) return by_bank_.oldest(richest);
        return all_.oldest(0);
    }

  private:
    struct Richer {
        const std::vector<int64_t>* excess;
        bool operator()(uint32_t a, uint32_t b) const {
            return (*excess)[a] != (*excess)[b] ? (*excess)[a] > (*excess)[b] : a < b;
        }
    };
    void hold(uint32_t bank, int64_t more) {
        excess_[bank] += more;
        if (richest_.contains(bank)) richest_.update(bank);
    }
    void enter(uint32_t expert) override {
        const uint32_t bank = bank_of_[expert];
        if (by_bank_.empty(bank)) richest_.push(bank);
        by_bank_.insert(bank, expert);
        all_.insert(0, expert);
    }
    void leave(uint32_t expert) override {
        const uint32_t bank = bank_of_[expert];
        by_bank_.remove(expert);
        all_.remove(expert);
        if (by_bank_.empty(bank)) richest_.remove(bank);
    }
    std::vector<uint32_t> bank_of_;
    std::vector<int64_t> excess_;  // per bank: experts held (pinned too) minus the quota
    RecencyLists by_bank_, all_;
    IndexedHeap<Richer> richest_;  // banks that have a candidate, furthest above the quota first
    uint64_t clock_ = 0;
};

const PolicyRegistration registration(
    "lru-layer", "LRU inside an equal share of the budget for each layer; no argument",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument("lru-layer", argument);
        return std::make_unique<LruLayer>(shape);
    });

}  // namespace
}  // namespace moestream
