// What followed moments like this one: the last single-token passes, kept as one set of experts for each bank, and how
// like the present each of them is.
//
// Text repeats itself: when the routes of the last layers resemble those of an earlier moment, the experts that were
// used in the passes after that moment are likely to be used next. How alike two moments are is the share of this
// route's experts that were used there too, decayed over the routes (so mostly the last three or four layers speak).
// One route costs kMoments times (experts of a route + kAhead) operations; nothing is allocated after construction.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace moestream {

class Moments {
  public:
    static constexpr uint32_t kMoments = 256;     // passes remembered
    static constexpr uint32_t kAhead = 4;         // passes after a moment that count as what followed it
    static constexpr double kAheadDecay = 0.6;    // each pass further ahead counts so much of the one before
    static constexpr double kRouteDecay = 0.7;    // of likeness, a route
    static constexpr double kSharpness = 20.0;    // bits by which a moment wholly alike outweighs one wholly unlike
    static constexpr double kAgeHalfLife = 64.0;  // passes

    Moments(uint32_t banks, uint32_t widest) : banks_(banks), words_((widest + 63) / 64) {
        sets_.resize(size_t{kMoments} * banks * words_);
        for (uint32_t age = 0; age < kMoments; ++age) by_age_[age] = std::exp2(-(age / kAgeHalfLife));
    }
    // A new pass begins; the oldest is forgotten.
    void begin() {
        ++count_;
        for (uint32_t bank = 0; bank < banks_; ++bank) std::fill_n(set_of(now(), bank), words_, 0);
        alike_[now() % kMoments] = 0.0;
    }
    // Expert `number` of the bank is in the current pass' route.
    void add(uint32_t bank, uint32_t number) { set_of(now(), bank)[number / 64] |= uint64_t{1} << (number % 64); }

    // The bank's route is complete. Adds to `expected[number]` for each expert of the bank how much it is to be
    // expected, and returns the sum of all moments' weights: the expectation of one used after each of them. Zero:
    // nothing is known yet.
    double expect(uint32_t bank, double* expected) {
        const uint64_t* route = set_of(now(), bank);
        double size = 0.0, total = 0.0;
        for (uint32_t word = 0; word < words_; ++word) size += std::popcount(route[word]);
        const uint64_t first = count_ > kMoments ? count_ - kMoments : 0;
        // weight[j]: of the moment j + 1 passes before the one looked at.
        std::array<double, kAhead> weight{};
        for (uint64_t moment = first; moment <= now(); ++moment) {
            double after = 0.0, share = 1.0;
            for (const double w : weight) {
                after += w * share;
                share *= kAheadDecay;
            }
            total += after;
            spread(set_of(moment, bank), after, expected);
            std::copy_backward(weight.begin(), weight.end() - 1, weight.end());
            if (moment < now()) weight[0] = compare(moment, bank, route, size);
        }
        return total;
    }

  private:
    uint64_t now() const { return count_ - 1; }
    uint64_t* set_of(uint64_t moment, uint32_t bank) {
        return sets_.data() + (size_t{bank} * kMoments + moment % kMoments) * words_;
    }
    // How much an earlier moment weighs, now that this route is known too.
    double compare(uint64_t moment, uint32_t bank, const uint64_t* route, double size) {
        const uint64_t* set = set_of(moment, bank);
        double common = 0.0;
        for (uint32_t word = 0; word < words_; ++word) common += std::popcount(set[word] & route[word]);
        double& alike = alike_[moment % kMoments];
        alike = alike * kRouteDecay + common / size * (1.0 - kRouteDecay);
        return by_age_[now() - moment] * std::exp2(alike * kSharpness);
    }
    void spread(const uint64_t* set, double weight, double* expected) const {
        if (weight == 0.0) return;
        for (uint32_t word = 0; word < words_; ++word)
            for (uint64_t bits = set[word]; bits != 0; bits &= bits - 1)
                expected[word * 64 + static_cast<uint32_t>(std::countr_zero(bits))] += weight;
    }
    uint32_t banks_, words_;
    uint64_t count_ = 0;               // passes begun
    std::vector<uint64_t> sets_;       // [banks][kMoments][words], a bit an expert: a route looks at one bank
    std::array<double, kMoments> alike_{};
    std::array<double, kMoments> by_age_{};
};

}  // namespace moestream
