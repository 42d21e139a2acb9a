// none: nothing is kept on purpose. Frames are reused in the order they were filled (FIFO), whatever was used
// since; a route's own experts are the only ones that are safe, and only while the route is pinned.
#include "candidates.h"
#include "indexed_heap.h"

namespace moestream {
namespace {

// A heap, not a list: an expert that is unpinned returns to its place by admission, which may be anywhere.
class None final : public CandidatePolicy {
  public:
    explicit None(const PolicyShape& shape)
        : CandidatePolicy(shape.experts), admitted_(shape.experts, 0), heap_(shape.experts, Earlier{&admitted_}) {}
    None(const None&) = delete;  // the heap points at admitted_
    None& operator=(const None&) = delete;

    void use(uint32_t, const Use&) override {}
    void admit(uint32_t expert) override {
        admitted_[expert] = ++clock_;
        CandidatePolicy::admit(expert);
    }
    uint32_t victim(uint32_t) override { return heap_.top(); }

  private:
    struct Earlier {
        const std::vector<uint64_t>* admitted;
        bool operator()(uint32_t a, uint32_t b) const { return (*admitted)[a] < (*admitted)[b]; }
    };
    void enter(uint32_t expert) override { heap_.push(expert); }
    void leave(uint32_t expert) override { heap_.remove(expert); }
    std::vector<uint64_t> admitted_;  // per expert: number of its last admission
    IndexedHeap<Earlier> heap_;
    uint64_t clock_ = 0;
};

const PolicyRegistration registration(
    "none", "keeps nothing on purpose: frames are reused in the order they were filled; no argument",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument("none", argument);
        return std::make_unique<None>(shape);
    });

}  // namespace
}  // namespace moestream
