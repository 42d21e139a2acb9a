// pinned:FILE: the experts that a trace found hottest never leave once they are loaded, LRU decides about the rest. The
// core never sees the file: its reader hands over a priority for each expert (PolicyShape::priority).
//
// As many experts are kept as leave frames for a whole bank, the widest there is: a route names experts of one bank, so
// any route finds its frames without touching a kept one. Experts of priority 0 were not in the trace and are not kept.
#include <algorithm>
#include <numeric>

#include "candidates.h"
#include "recency_lists.h"

namespace moestream {
namespace {

class Pinned final : public CandidatePolicy {
  public:
    explicit Pinned(const PolicyShape& shape)
        : CandidatePolicy(shape.experts), used_(shape.experts, 1), kept_(shape.experts, 0) {
        std::vector<uint32_t> size(shape.banks, 0), order(shape.experts);
        for (const uint32_t bank : shape.bank_of) ++size[bank];
        const uint32_t room = *std::max_element(size.begin(), size.end());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](uint32_t a, uint32_t b) { return shape.priority[a] > shape.priority[b]; });
        const uint32_t keep = shape.capacity > room ? shape.capacity - room : 0;
        for (uint32_t i = 0; i < keep; ++i) kept_[order[i]] = shape.priority[order[i]] > 0;
    }
    void use(uint32_t expert, const Use&) override {
        ++clock_;
        if (candidate(expert) && !kept_[expert]) {
            used_.touch(0, expert, clock_);
        } else {
            used_.stamp[expert] = clock_;
        }
    }
    uint32_t victim(uint32_t) override { return used_.oldest(0); }
    bool elastic() const override { return false; }

  private:
    void enter(uint32_t expert) override {
        if (!kept_[expert]) used_.insert(0, expert);
    }
    void leave(uint32_t expert) override {
        if (!kept_[expert]) used_.remove(expert);
    }
    RecencyLists used_;  // candidates that are not kept
    std::vector<uint8_t> kept_;
    uint64_t clock_ = 0;
};

const PolicyRegistration registration(
    "pinned", "the experts a trace found hottest stay, LRU for the rest; argument: the trace's file",
    [](const PolicyShape& shape, const std::string&) -> std::unique_ptr<Policy> {
        if (shape.priority.size() != shape.experts)
            throw Error(ErrorKind::usage, "pinned needs a trace to tell what is hot: pinned:FILE");
        return std::make_unique<Pinned>(shape);
    });

}  // namespace
}  // namespace moestream
