// none: nothing is kept on purpose. Frames are reused in the order they were filled (FIFO), whatever was used
// since; a route's own experts are the only ones that are safe, and only while the route is pinned.
#include "candidates.h"
#include "recency_lists.h"

namespace moestream {
namespace {

class None final : public CandidatePolicy {
  public:
    explicit None(const PolicyShape& shape) : CandidatePolicy(shape.experts), admitted_(shape.experts, 1) {}
    void use(uint32_t, const Use&) override {}
    void admit(uint32_t expert) override {
        admitted_.stamp[expert] = ++clock_;
        CandidatePolicy::admit(expert);
    }
    uint32_t victim(uint32_t) override { return admitted_.oldest(0); }

  private:
    void enter(uint32_t expert) override { admitted_.insert(0, expert); }
    void leave(uint32_t expert) override { admitted_.remove(expert); }
    RecencyLists admitted_;
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
