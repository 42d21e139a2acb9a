// lfu-decay:H: the expert with the smallest decayed frequency leaves.
#include "candidates.h"
#include "decayed_use.h"
#include "indexed_heap.h"

namespace moestream {
namespace {

class LfuDecay final : public CandidatePolicy {
  public:
    LfuDecay(const PolicyShape& shape, double half_life)
        : CandidatePolicy(shape.experts), heat_(shape.experts, half_life), heap_(shape.experts, Colder{&heat_}) {}
    LfuDecay(const LfuDecay&) = delete;  // the heap points at heat_
    LfuDecay& operator=(const LfuDecay&) = delete;

    void use(uint32_t expert, const Use& use) override {
        heat_.use(expert, use);
        if (candidate(expert)) heap_.update(expert);
    }
    uint32_t victim(uint32_t) override { return heap_.top(); }

  private:
    void enter(uint32_t expert) override { heap_.push(expert); }
    void leave(uint32_t expert) override { heap_.remove(expert); }
    DecayedUse heat_;
    IndexedHeap<Colder> heap_;
};

const PolicyRegistration registration(
    "lfu-decay", "the expert with the smallest decayed frequency leaves; argument: half-life in tokens (default 16)",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        const double half_life = parse_number(argument, 16.0, 1.0, 1e9,
                                              "lfu-decay's half-life is a number of tokens from 1 to 1e9");
        return std::make_unique<LfuDecay>(shape, half_life);
    });

}  // namespace
}  // namespace moestream
