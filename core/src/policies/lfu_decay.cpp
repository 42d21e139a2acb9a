// lfu-decay:H: the expert with the smallest decayed frequency leaves. A use counts 1 and loses half its weight every
// H tokens. The history of absent experts is kept, so an expert that comes back is not a stranger.
//
// Everything decays at the same rate, so the order of two experts never changes between uses: the frequency at
// the last use, moved to token 0 in the log domain, log2(f) + t_last / H, orders all experts at all times. It is
// computed anew from f and t_last at each use and so cannot drift, however long the run.
#include <charconv>
#include <cmath>
#include <limits>
#include <numbers>

#include "candidates.h"
#include "indexed_heap.h"

namespace moestream {
namespace {

constexpr double kDefaultHalfLife = 16.0;
constexpr double kMinHalfLife = 1.0, kMaxHalfLife = 1e9;  // tokens

class LfuDecay final : public CandidatePolicy {
  public:
    LfuDecay(const PolicyShape& shape, double half_life)
        : CandidatePolicy(shape.experts),
          half_life_(half_life),
          history_(shape.experts),
          rank_(shape.experts),
          heap_(shape.experts, Colder{&rank_}) {}
    LfuDecay(const LfuDecay&) = delete;  // the heap points at rank_
    LfuDecay& operator=(const LfuDecay&) = delete;

    void use(uint32_t expert, const Use& use) override {
        History& history = history_[expert];
        const uint64_t last = use.token + use.tokens - 1;  // the step's last token
        const uint64_t since = last > history.last ? last - history.last : 0;
        // volatile: a fused multiply-add would round otherwise than the specification does.
        volatile double kept = history.frequency * std::exp2(-(static_cast<double>(since) / half_life_));
        volatile double added = use.count * weight(use.tokens);
        history.frequency = kept + added;
        history.last += since;
        rank_[expert] = {std::log2(history.frequency) + static_cast<double>(history.last) / half_life_, ++clock_};
        if (candidate(expert)) heap_.update(expert);
    }
    uint32_t victim(uint32_t) override { return heap_.top(); }

  private:
    struct History {
        double frequency = 0.0;  // at token `last`
        uint64_t last = 0;
    };
    struct Rank {
        double key = -std::numeric_limits<double>::infinity();
        uint64_t used = 0;
    };
    struct Colder {
        const std::vector<Rank>* rank;
        bool operator()(uint32_t a, uint32_t b) const {
            const Rank &x = (*rank)[a], &y = (*rank)[b];
            if (x.key != y.key) return x.key < y.key;
            return x.used != y.used ? x.used < y.used : a < b;
        }
    };
    // The mean decay, by the step's end, of uses spread evenly over its n tokens.
    double weight(uint32_t tokens) const {
        if (tokens == 1) return 1.0;
        const double n = tokens;
        return half_life_ / (n * std::numbers::ln2) * (1.0 - std::exp2(-(n / half_life_)));
    }
    void enter(uint32_t expert) override { heap_.push(expert); }
    void leave(uint32_t expert) override { heap_.remove(expert); }

    double half_life_;
    std::vector<History> history_;
    std::vector<Rank> rank_;
    IndexedHeap<Colder> heap_;
    uint64_t clock_ = 0;
};

double parse_half_life(const std::string& text) {
    if (text.empty()) return kDefaultHalfLife;
    double value = 0.0;
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool number = failure == std::errc() && end == text.data() + text.size();
    if (!number || !(value >= kMinHalfLife && value <= kMaxHalfLife))
        throw Error(ErrorKind::usage, "lfu-decay's half-life is a number of tokens from 1 to 1e9, got '" + text + "'");
    return value;
}

const PolicyRegistration registration(
    "lfu-decay", "the expert with the smallest decayed frequency leaves; argument: half-life in tokens (default 16)",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        return std::make_unique<LfuDecay>(shape, parse_half_life(argument));
    });

}  // namespace
}  // namespace moestream
