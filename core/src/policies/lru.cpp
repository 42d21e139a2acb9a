// lru: the expert whose last use is longest ago leaves. An expert that was loaded early and never used is as old as
// its last use before that, so a wrong guess is the first to go.
#include "candidates.h"
#include "recency_lists.h"

namespace moestream {
namespace {

class Lru final : public CandidatePolicy {
  public:
    explicit Lru(const PolicyShape& shape) : CandidatePolicy(shape.experts), used_(shape.experts, 1) {}
    void use(uint32_t expert, const Use&) override {
        ++clock_;
        if (candidate(expert)) {
            used_.touch(0, expert, clock_);
        } else {
            used_.stamp[expert] = clock_;
        }
    }
    uint32_t victim(uint32_t) override { return used_.oldest(0); }

  private:
    void enter(uint32_t expert) override { used_.insert(0, expert); }
    void leave(uint32_t expert) override { used_.remove(expert); }
    RecencyLists used_;
    uint64_t clock_ = 0;
};

const PolicyRegistration registration(
    "lru", "the expert used longest ago leaves; no argument",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument("lru", argument);
        return std::make_unique<Lru>(shape);
    });

}  // namespace
}  // namespace moestream
