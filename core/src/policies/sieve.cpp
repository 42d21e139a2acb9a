// sieve (Zhang et al., NSDI 2024): a queue in the order of loading, a bit for each expert that was used again, and a
// hand that moves from old to new. It clears the bits it meets and takes the first expert without one; what stays keeps
// its place in the queue.
//
// The use that an expert was loaded for does not set its bit. The hand passes pinned experts and leaves their bits
// alone. A victim costs O(1) amortised: each expert the hand passes had a bit that some use paid for, or is pinned.
#include "candidates.h"
#include "recency_lists.h"

namespace moestream {
namespace {

class Sieve final : public CandidatePolicy {
  public:
    explicit Sieve(const PolicyShape& shape)
        : CandidatePolicy(shape.experts), queue_(shape.experts, 1), state_(shape.experts, kFresh) {}

    void use(uint32_t expert, const Use&) override {
        state_[expert] = state_[expert] == kFresh ? kUnvisited : kVisited;
    }
    void admit(uint32_t expert) override {
        state_[expert] = kFresh;
        queue_.stamp[expert] = ++clock_;
        queue_.insert(0, expert);
        CandidatePolicy::admit(expert);
    }
    void forget(uint32_t expert) override {
        CandidatePolicy::forget(expert);
        if (hand_ == expert) hand_ = queue_.newer(0, expert);
        queue_.remove(expert);
    }
    uint32_t victim(uint32_t) override {
        if (candidates_ == 0) return kNone;
        for (hand_ = from_hand(); !takes(hand_); hand_ = from_hand()) hand_ = queue_.newer(0, hand_);
        return hand_;
    }

  private:
    enum State : uint8_t { kFresh, kUnvisited, kVisited };  // fresh: not yet used since it was loaded
    uint32_t from_hand() const { return hand_ == kNone ? queue_.oldest(0) : hand_; }
    bool takes(uint32_t expert) {
        if (!candidate(expert)) return false;
        if (state_[expert] != kVisited) return true;
        state_[expert] = kUnvisited;
        return false;
    }
    void enter(uint32_t) override { ++candidates_; }
    void leave(uint32_t) override { --candidates_; }
    RecencyLists queue_;  // all residents, pinned ones too, in the order of loading
    std::vector<State> state_;
    uint32_t hand_ = kNone;  // kNone: starts at the oldest
    uint32_t candidates_ = 0;
    uint64_t clock_ = 0;
};

const PolicyRegistration registration(
    "sieve", "a hand sweeps from old to new and takes the first expert not used since it last passed; no argument",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument("sieve", argument);
        return std::make_unique<Sieve>(shape);
    });

}  // namespace
}  // namespace moestream
