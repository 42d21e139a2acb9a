// How much each expert has been used of late. A use counts 1 and loses half its weight every H tokens; the history of
// absent experts is kept, so one that comes back is not a stranger.
//
// Everything decays at the same rate, so the order of two experts never changes between uses: the frequency at
// the last use, moved to token 0 in the log domain, log2(f) + t_last / H, orders all experts at all times. It is
// computed anew from f and t_last at each use and so cannot drift, however long the run. A use only raises it.
#pragma once
#include <charconv>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "moestream/policy.h"

namespace moestream {

// The mean decay, by the step's end, of uses spread evenly over its tokens.
inline double mean_decay(uint32_t tokens, double half_life) {
    if (tokens == 1) return 1.0;
    const double n = tokens;
    return half_life / (n * std::numbers::ln2) * (1.0 - std::exp2(-(n / half_life)));
}

class DecayedUse {
  public:
    DecayedUse(uint32_t experts, double half_life) : half_life_(half_life), history_(experts), rank_(experts) {}

    void use(uint32_t expert, const Use& use) {
        History& history = history_[expert];
        const uint64_t last = use.token + use.tokens - 1;  // the step's last token
        const uint64_t since = last > history.last ? last - history.last : 0;
        // volatile: a fused multiply-add would round otherwise than the specification does.
        volatile double kept = history.frequency * std::exp2(-(static_cast<double>(since) / half_life_));
        volatile double added = use.count * mean_decay(use.tokens, half_life_);
        history.frequency = kept + added;
        history.last += since;
        rank_[expert] = {std::log2(history.frequency) + static_cast<double>(history.last) / half_life_, ++clock_};
    }
    // A strict total order: less decayed use, then used longer ago, then the lower number.
    bool colder(uint32_t a, uint32_t b) const {
        const Rank &x = rank_[a], &y = rank_[b];
        if (x.key != y.key) return x.key < y.key;
        return x.used != y.used ? x.used < y.used : a < b;
    }

  private:
    struct History {
        double frequency = 0.0;  // at token `last`
        uint64_t last = 0;
    };
    struct Rank {
        double key = -std::numeric_limits<double>::infinity();
        uint64_t used = 0;
    };
    double half_life_;
    std::vector<History> history_;
    std::vector<Rank> rank_;
    uint64_t clock_ = 0;
};

// A heap's order by one DecayedUse, which must outlive the heap.
struct Colder {
    const DecayedUse* of;
    bool operator()(uint32_t a, uint32_t b) const { return of->colder(a, b); }
};

// All of `text` as a T from `low` to `high`; `fallback` for an empty text. Throws Error(usage) that says `what`.
template <class T>
T parse_number(const std::string& text, T fallback, T low, T high, const char* what) {
    if (text.empty()) return fallback;
    T value{};
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool number = failure == std::errc() && end == text.data() + text.size();
    if (!number || !(value >= low && value <= high))
        throw Error(ErrorKind::usage, std::string(what) + ", got '" + text + "'");
    return value;
}

}  // namespace moestream
