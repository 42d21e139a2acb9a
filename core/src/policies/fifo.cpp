// fifo: frames are reused in the order they were filled, whatever was used since; a route's own experts are the only
// ones that are safe, and only while the route is pinned. Under the name `none` it is what a store does whose frames
// must be reused somehow and where nobody has asked for anything to be kept.
#include "candidates.h"
#include "indexed_heap.h"

namespace moestream {
namespace {

// A heap, not a list: an expert that is unpinned returns to its place by admission, which may be anywhere.
class Fifo final : public CandidatePolicy {
  public:
    explicit Fifo(const PolicyShape& shape)
        : CandidatePolicy(shape.experts), admitted_(shape.experts, 0), heap_(shape.experts, Earlier{&admitted_}) {}
    Fifo(const Fifo&) = delete;  // the heap points at admitted_
    Fifo& operator=(const Fifo&) = delete;

    void use(uint32_t, const Use&) override {}
    void admit(uint32_t expert) override {
        admitted_[expert] = ++clock_;
        CandidatePolicy::admit(expert);
    }
    uint32_t victim(uint32_t) override { return heap_.top(); }

  private:
    void enter(uint32_t expert) override { heap_.push(expert); }
    void leave(uint32_t expert) override { heap_.remove(expert); }
    std::vector<uint64_t> admitted_;  // per expert: number of its last admission
    IndexedHeap<Earlier> heap_;
    uint64_t clock_ = 0;
};

PolicyFactory named(const char* name) {
    return [name](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument(name, argument);
        return std::make_unique<Fifo>(shape);
    };
}

const PolicyRegistration registration("fifo", "frames are reused in the order they were filled; no argument",
                                      named("fifo"));
const PolicyRegistration registration_of_none(
    "none", "keeps nothing on purpose: frames are reused in the order they were filled; no argument", named("none"));

}  // namespace
}  // namespace moestream
