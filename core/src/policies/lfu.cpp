// lfu: the expert used least often since it was loaded leaves; nothing is forgotten while it stays, everything when it
// goes. An early load that was never used has no use and is the first to go.
#include "candidates.h"
#include "indexed_heap.h"

namespace moestream {
namespace {

class Lfu final : public CandidatePolicy {
  public:
    explicit Lfu(const PolicyShape& shape)
        : CandidatePolicy(shape.experts), count_(shape.experts), heap_(shape.experts, Rarer{&count_}) {}
    Lfu(const Lfu&) = delete;  // the heap points at count_
    Lfu& operator=(const Lfu&) = delete;

    void use(uint32_t expert, const Use& use) override {
        count_[expert].uses += use.count;
        count_[expert].last = ++clock_;
        if (candidate(expert)) heap_.update(expert);
    }
    void admit(uint32_t expert) override {
        count_[expert].uses = 0;
        CandidatePolicy::admit(expert);
    }
    uint32_t victim(uint32_t) override { return heap_.top(); }

  private:
    struct Count {
        uint64_t uses = 0;  // since it was loaded
        uint64_t last = 0;  // number of its last use
    };
    struct Rarer {
        const std::vector<Count>* count;
        bool operator()(uint32_t a, uint32_t b) const {
            const Count &x = (*count)[a], &y = (*count)[b];
            if (x.uses != y.uses) return x.uses < y.uses;
            return x.last != y.last ? x.last < y.last : a < b;
        }
    };
    void enter(uint32_t expert) override { heap_.push(expert); }
    void leave(uint32_t expert) override { heap_.remove(expert); }
    std::vector<Count> count_;
    IndexedHeap<Rarer> heap_;
    uint64_t clock_ = 0;
};

const PolicyRegistration registration(
    "lfu", "the expert used least often since it was loaded leaves; no argument",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument("lfu", argument);
        return std::make_unique<Lfu>(shape);
    });

}  // namespace
}  // namespace moestream
